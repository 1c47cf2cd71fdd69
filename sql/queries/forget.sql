-- name: find_recipients_page
-- Reads the recipients of the next emails after a given id. Returns one row: the last id of these emails (null: there are
-- none), their number, and [id, recipients] of each email whose recipients contain a text, in any case. The caller must
-- compare the addresses: the text only reduces what PostgreSQL sends.
with page as materialized (
    select email_id, recipients
    from dispatcher.email_content
    where email_id > %(after)s
    order by email_id
    limit %(limit)s
)
select
    (select email_id from page order by email_id desc limit 1),
    count(*)::integer,
    coalesce(
        jsonb_agg(jsonb_build_array(email_id, recipients)) filter (
            where position(%(part)s::text in lower(recipients::text)) > 0
        ),
        jsonb_build_array()
    )
from page;

-- name: find_recipient_events
-- The next emails after a given id that have an event with the given hash of an address.
select distinct email_id
from dispatcher.email_event
where address_hash = %(address_hash)s
    and email_id > %(after)s
order by email_id
limit %(limit)s;

-- name: find_forgettable
-- What forget_emails would erase, with the same columns. Changes nothing.
select
    e.email_id,
    e.status in ('sent', 'failed', 'held', 'cancelled'),
    false,
    c.email_id is not null,
    (
        select count(*)::integer
        from dispatcher.email_attachment as a
        where a.email_id = e.email_id
            and a.email_id between %(lowest_id)s and %(highest_id)s
    ),
    (
        select count(*)::integer
        from dispatcher.email_event as v
        where v.email_id = e.email_id
            and v.email_id between %(lowest_id)s and %(highest_id)s
            and v.address_hash = %(address_hash)s
    )
from dispatcher.email_log as e
left join dispatcher.email_content as c
    on c.email_id = e.email_id
    and c.email_id between %(lowest_id)s and %(highest_id)s
where {is_e_given}
order by e.email_id;

-- name: forget_emails
-- Erases a recipient from finished emails (sent, failed, held or cancelled), in one commit. Deletes the content, the
-- attachments and the recipients' hashes of these emails. Empties the hashes of their payloads, because a guess of the
-- payload has the same hash. So a repeated enqueue of such an email is a conflict. Deletes the hash of the address from
-- their events, and all texts of providers, because these texts may quote the address. An event's key is made from the
-- hash, so the key is replaced by a random key. The rows of email_log stay, to prove that the emails existed. Each changed
-- email is audited, without the address.
-- Returns a row per email: whether the email is finished (an unfinished email is not changed), whether another
-- transaction has locked its row (then the email is not changed, either), whether it had content, and its number of
-- attachments and of events with the hash.
with free as (
    select email_id, tenant_id, message_key
    from dispatcher.email_log
    where {is_given}
        and (status in ('sent', 'failed', 'held', 'cancelled')) is true
    order by email_id
    for no key update skip locked
),
content as (
    delete from dispatcher.email_content
    where {is_free}
    returning email_id
),
attachment as (
    delete from dispatcher.email_attachment
    where {is_free}
    returning email_id
),
recipient as (
    delete from dispatcher.email_recipient
    where {is_free}
),
key as (
    update dispatcher.email_idempotency as k
    set payload_hash = ''
    from free
    where k.tenant_id = free.tenant_id
        and k.message_key = free.message_key
        and k.payload_hash <> ''
),
event as (
    update dispatcher.email_event
    set
        event_key = case
            when address_hash = %(address_hash)s then uuid_send(gen_random_uuid())
            else event_key
        end,
        address_hash = nullif(address_hash, %(address_hash)s),
        detail = null
    where {is_free}
        and (detail is not null or address_hash = %(address_hash)s) is true
    returning email_id
),
attempt as (
    update dispatcher.email_attempt
    set error = null
    where {is_free}
        and (error is not null) is true
    returning email_id
),
answer as (
    update dispatcher.email_log
    set last_error = null
    where {is_free}
        and (last_error is not null) is true
    returning email_id
),
erased as (
    select
        e.email_id,
        e.status in ('sent', 'failed', 'held', 'cancelled') as is_finished,
        e.email_id in (select email_id from free) as is_free,
        e.email_id in (select email_id from content) as had_content,
        (select count(*)::integer from attachment as a where a.email_id = e.email_id) as attachments,
        (select count(*)::integer from event as v where v.email_id = e.email_id) as events,
        e.email_id in (select email_id from attempt union all select email_id from answer) as had_texts
    from dispatcher.email_log as e
    where {is_e_given}
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select
        %(actor)s, 'forget', %(reason)s, email_id,
        jsonb_build_object('content', had_content, 'attachments', attachments, 'events', events)
    from erased
    where had_content
        or attachments > 0
        or events > 0
        or had_texts
    order by email_id
)
select email_id, is_finished, is_finished and not is_free, had_content, attachments, events
from erased
order by email_id;

-- name: forget_outgoing_events
-- Reads the whole feed of outgoing events once; they are kept only for days. No rows.
update dispatcher.outgoing_event
set address_hash = null
where address_hash = %(address_hash)s;

-- name: count_suppressions_of
-- The number of entries for an address, of all tenants and topics.
select count(*)::integer
from dispatcher.suppression
where %(address_hash)s in (address_hash, recipient_hash)
    and not is_domain;

-- name: forget_suppressions
-- Without `removes`, keeps the entries for an address, so that it gets no email, but erases their texts, which could
-- identify the address. Of all tenants. Returns one row: the number of entries.
with removed as (
    delete from dispatcher.suppression
    where %(address_hash)s in (address_hash, recipient_hash)
        and not is_domain
        and %(removes)s
    returning suppression_id
),
blanked as (
    update dispatcher.suppression
    set masked = %(masked)s, note = null, source_event_key = null
    where %(address_hash)s in (address_hash, recipient_hash)
        and not is_domain
        and not %(removes)s
    returning suppression_id
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    select
        %(actor)s, 'forget', %(reason)s,
        jsonb_build_object('suppression_ids', array_agg(suppression_id), 'removed', %(removes)s)
    from (select suppression_id from removed union all select suppression_id from blanked) as entry
    having count(*) > 0
)
select ((select count(*) from removed) + (select count(*) from blanked))::integer;
