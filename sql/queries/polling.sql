-- Statements about messages of channels other than email. The monitor asks a provider what became of these messages,
-- because the events that the provider sends may be lost.

-- name: find_polled
-- Messages that became sent or held after an instant (null: oldest_seconds ago) and at least youngest_seconds ago. A
-- message is open if the provider may know more: no event has reported the final result, and the message is held or has
-- a provider's id. The next search continues after the last returned message, so the others are returned, too.
with seen as materialized (
    select email_id, status, provider_message_id, coalesce(sent_at, settled_at) as since
    from dispatcher.email_log
    where channel is not null
        and status in ('sent', 'held')
        and coalesce(sent_at, settled_at)
            > coalesce(%(after)s::timestamptz, now() - %(oldest_seconds)s::double precision * interval '1 second')
        and coalesce(sent_at, settled_at) <= now() - %(youngest_seconds)s::double precision * interval '1 second'
        and (provider = %(provider)s or (provider is null and status = 'held'))
    order by coalesce(sent_at, settled_at)
    limit %(limit)s
),
ended as materialized (
    select distinct email_id
    from dispatcher.email_event
    where email_id = any(array(select email_id from seen))
        and kind in ('delivered', 'bounced', 'rejected', 'unsubscribed')
        and doubt is distinct from 'impossible'
)
select
    email_id, since, provider_message_id, status = 'held' as is_held,
    (status = 'held' or provider_message_id is not null) and email_id not in (select email_id from ended) as is_open
from seen
order by since;

-- name: find_held_message
-- What identifies a held message in a provider's list: recipient, sender, text, and the time in which the provider can
-- have accepted the message. Also returns the provider's ids of other messages to the same recipient. slack_seconds is
-- how much the clocks may differ.
-- No row: the message is no longer held, its content was deleted, or the message cannot be identified. A message cannot
-- be identified in two cases. First, another message to the same recipient may have been accepted at the same time, and
-- it has the same text, or its text was deleted. Second, the recipient has more than max_others other messages.
with held as materialized (
    select
        c.recipients -> 'to' ->> 0 as recipient, c.sender, c.text_body,
        e.leased_at - %(slack_seconds)s::double precision * interval '1 second' as accepted_from,
        e.settled_at + %(slack_seconds)s::double precision * interval '1 second' as accepted_until
    from dispatcher.email_log as e
    join dispatcher.email_content as c using (email_id)
    where e.email_id = %(email_id)s
        and c.email_id = %(email_id)s
        and e.status = 'held'
        and e.leased_at <= e.settled_at
),
own as materialized (
    select domain, address_hash
    from dispatcher.email_recipient
    where email_id = %(email_id)s
    limit 1
),
others as materialized (
    select email_id
    from dispatcher.email_recipient
    where domain = (select domain from own)
        and address_hash = (select address_hash from own)
        and email_id <> %(email_id)s
    order by email_id desc
    limit %(max_others)s + 1
),
texts as materialized (
    select email_id, text_body
    from dispatcher.email_content
    where email_id = any(array(select email_id from others))
),
compared as materialized (
    select
        o.email_id, o.provider_message_id,
        o.leased_at is not null
        and o.created_at <= h.accepted_until
        and h.accepted_from <= case
            when o.status in ('sent', 'failed', 'held', 'cancelled') then greatest(o.sent_at, o.settled_at)
            else now()
        end
        and (t.text_body = h.text_body) is not false as is_rival
    from dispatcher.email_log as o
    left join texts as t using (email_id)
    cross join held as h
    where o.email_id = any(array(select email_id from others))
)
select
    recipient, sender, text_body, accepted_from, accepted_until,
    array(select provider_message_id from compared where provider_message_id is not null)
from held
where text_body is not null
    and exists (select from own)
    and not exists (select from compared where is_rival)
    and (select count(*) from others) <= %(max_others)s;
