-- part: is_given
-- Whether an email is one of the given ones. With the lowest and the highest id, PostgreSQL skips the weekly partitions
-- that contain none of them.
email_id = any(%(email_ids)s) and email_id between %(lowest_id)s and %(highest_id)s

-- part: is_e_given
-- As is_given, for the email `e`.
e.email_id = any(%(email_ids)s) and e.email_id between %(lowest_id)s and %(highest_id)s

-- part: is_free
-- Whether an email is in `free`: one of the given emails, whose row this statement has locked.
email_id = any(array(select email_id from free)) and email_id between %(lowest_id)s and %(highest_id)s

-- part: given_and_locked
-- The given emails of a tenant (null: of any), locked in the order of their ids. Waits for locked rows, so that each
-- answer is about a committed status, for example after a concurrent lease. A test key sees only tests.
from dispatcher.email_log
where {is_given}
    and (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s)
    and (not %(is_test)s or channel = 'test')
order by email_id
for no key update

-- part: audited
-- Audits each row of `changed` as the action `act`, with its `detail`.
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    select %(actor)s, act, %(reason)s, detail
    from changed
)

-- part: audited_emails
-- As audited, for the emails in `changed`.
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select %(actor)s, act, %(reason)s, email_id, detail
    from changed
)

-- part: announced
-- Writes an event of the feed for each email in `changed`, unless its `kind` is null.
announced as (
    insert into dispatcher.outgoing_event (kind, email_id, tenant_id, message_key, correlation_id, reason, provider)
    select kind, email_id, tenant_id, message_key, correlation_id, reason, provider
    from changed
    where (select is_on from dispatcher.outgoing_feed)
        and kind is not null
)

-- name: find_recipients
-- The addresses of emails, as lists under "to", "cc" and "bcc". No row for an email whose content was deleted.
select email_id, recipients
from dispatcher.email_content
where {is_given};

-- name: find_subjects
-- The subject, the tags, the metadata and the sender's domain of emails. No row for an email whose content was deleted.
select email_id, left(subject, 200), tags, metadata, rtrim(substring(sender from '@([^@]*)$'), '> ')
from dispatcher.email_content
where {is_given};

-- name: find_lines
-- What a row of a list shows of emails, without their content.
select
    email_id, tenant_id, message_key, status, delivery, lane, coalesce(channel, 'email') as channel, error_type,
    case when error_type is not null then last_error end as error, attempt_count, provider, created_at,
    case when status = 'waiting' then wait_until end as due_at
from dispatcher.email_log
where {is_given};

-- name: list_known_tenants
-- Tenants that have settings, an API key, or one of the newest emails.
select tenant_id
from (
    select tenant_id from (select tenant_id from dispatcher.email_log order by email_id desc limit 5000) as newest
    union select tenant_id from dispatcher.tenant_limit
    union select tenant_id from dispatcher.api_key where tenant_id is not null
) as known
order by tenant_id
limit 500;

-- name: find_details
-- The tags and the metadata of emails (null: none, or the content was deleted), and the kind and the time of the newest
-- event that is believed.
select e.email_id, c.tags, c.metadata, v.kind, v.happened_at
from dispatcher.email_log as e
left join dispatcher.email_content as c
    on c.email_id = e.email_id and c.email_id between %(lowest_id)s and %(highest_id)s
left join lateral (
    select kind, happened_at
    from dispatcher.email_event as o
    where o.email_id = e.email_id
        and o.email_id between %(lowest_id)s and %(highest_id)s
        and o.doubt is distinct from 'impossible'
    order by happened_at desc, received_at desc
    limit 1
) as v on true
where {is_e_given};

-- name: find_envelopes
-- The senders, the addresses and the subjects of emails. No row for an email whose content was deleted.
select email_id, sender, recipients, subject
from dispatcher.email_content
where {is_given};

-- name: find_recipient_hashes
-- The first 6 bytes of the hash of each recipient, also of emails whose content was deleted. Takes some milliseconds per
-- email in a large table, because the index is small and inexact. No row: the recipient was erased.
select email_id, array_agg(address_hash)
from dispatcher.email_recipient
where {is_given}
group by email_id;
