-- part: suppressed_hashes
-- A tenant, the first eight bytes of each hash, in ascending order and joined; whether at least one entry is a domain; and
-- the oldest transaction that is still running, from which read_changed_suppressions continues.
s.tenant_id,
coalesce(string_agg(substring(s.address_hash for 8), ''::bytea order by s.address_hash), ''::bytea),
coalesce(bool_or(s.is_domain), false),
pg_snapshot_xmin(pg_current_snapshot())::text

-- name: read_suppressions
-- All entries that have not expired; a row per tenant. If there are no entries, returns one row without a tenant.
select {suppressed_hashes}
from (values (true)) as always
left join dispatcher.suppression as s on s.expires_at is null or s.expires_at > now()
group by s.tenant_id;

-- name: read_changed_suppressions
-- As read_suppressions, but only entries of transactions that were not yet visible when `since` was read, and some read
-- before. If the database was restored from a dump, entries may contain ids of transactions that this server has not
-- reached yet. Such entries are left out, because read_suppressions has read them.
select {suppressed_hashes}
from (values (true)) as always
left join dispatcher.suppression as s
    on s.changed_in >= %(since)s::text::xid8
    and s.changed_in < pg_snapshot_xmax(pg_current_snapshot())
group by s.tenant_id;

-- part: new_suppression
-- What replaces an old entry: every column of the new one. Columns that the statement does not set are null.
(masked, reason, source_email_id, source_event_key, note, created_at, expires_at, changed_in) = (
    excluded.masked, excluded.reason, excluded.source_email_id, excluded.source_event_key, excluded.note,
    excluded.created_at, excluded.expires_at, excluded.changed_in
)

-- part: entry_key
-- Of the hash of a recipient, `address_hash`, and a topic: the columns address_hash, topic and recipient_hash of an entry. As
-- `hash_with_topic` in store/address_hashes.py.
coalesce(substring(sha256(address_hash || convert_to(topic, 'UTF8')) for 16), address_hash), topic,
case when topic is not null then address_hash end

-- name: find_suppressed
-- The given recipients that are suppressed for their email's tenant, and the reason. Leaves out emails with
-- ignore_suppression. address_hashes contains the hash of each recipient's address and of the address's domain, and for
-- an email with a topic the hashes of both with the topic; positions contains the position of the recipient for each hash.
select distinct on (w.email_id, w.position) w.email_id, w.position, s.reason
from unnest(%(emails)b::uuid[], %(positions)b::integer[], %(address_hashes)b::bytea[])
    as w (email_id, position, address_hash)
join dispatcher.email_log as e on e.email_id = w.email_id
join dispatcher.suppression as s on s.tenant_id = e.tenant_id and s.address_hash = w.address_hash
where e.email_id = any(%(email_ids)b)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and (s.expires_at is null or s.expires_at > now())
    and not exists (
        select from dispatcher.email_content as c
        where c.email_id = e.email_id
            and c.email_id between %(lowest_id)s and %(highest_id)s
            and c.ignore_suppression
    )
order by w.email_id, w.position, s.is_domain, s.topic nulls first;

-- name: insert_suppressions
-- Suppresses recipients of one tenant, and audits this without addresses. An entry that lasts at least as long as the
-- new entry does not change. Returns the number of entries that are new or changed, and the number of the others.
with input as (
    select *
    from unnest(
        %(address_hashes)b::bytea[],
        %(are_domains)b::boolean[],
        %(masked)b::text[],
        %(reasons)b::text[],
        %(notes)b::text[],
        %(expire_ats)b::timestamptz[],
        %(topics)b::text[]
    ) as t (address_hash, is_domain, masked, reason, note, expires_at, topic)
),
written as (
    insert into dispatcher.suppression as s (
        tenant_id, is_domain, masked, reason, note, expires_at, address_hash, topic, recipient_hash
    )
    select %(tenant_id)s, is_domain, masked, reason, note, expires_at, {entry_key}
    from input
    order by address_hash, topic
    on conflict (tenant_id, address_hash) do update
    set {new_suppression}
    where s.expires_at is not null
        and (excluded.expires_at is null or excluded.expires_at > s.expires_at)
    returning s.suppression_id
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    select
        %(actor)s, 'suppress', %(reason)s,
        jsonb_build_object(
            'tenant', %(tenant_id)s::text,
            'entries', count(*),
            'suppression_ids', (array_agg(suppression_id order by suppression_id))[1:100]
        )
    from written
    having count(*) > 0
)
select count(*)::integer as added, ((select count(*) from input) - count(*))::integer as unchanged
from written;

-- name: delete_suppressions
-- Removes entries of one tenant for an operator, and audits this without addresses. Returns the hash of each removed
-- entry.
with changed as (
    delete from dispatcher.suppression
    where tenant_id = %(tenant_id)s
        and (address_hash = any(%(address_hashes)s::bytea[]) or suppression_id = any(%(ids)s::bigint[]))
    returning
        address_hash, 'unsuppress' as act,
        jsonb_build_object(
            'tenant', tenant_id, 'suppression_id', suppression_id, 'was', reason, 'since', created_at
        ) as detail
),
{audited}
select address_hash
from changed;

-- part: suppression
-- An entry, as operators and applications see it: without the hash of the address.
suppression_id as id, masked as recipient, is_domain, reason as kind, topic, created_at, expires_at, source_email_id,
note, tenant_id

-- part: asked_tenants
-- The given tenant; without it, every tenant that has entries: steps from tenant to tenant in the unique index, which
-- begins with the tenant. The last row is null.
tenant (tenant_id) as (
    select coalesce(%(tenant_id)s::text, (select min(tenant_id) from dispatcher.suppression))
    union all
    select (select min(s.tenant_id) from dispatcher.suppression as s where s.tenant_id > t.tenant_id)
    from tenant as t
    where t.tenant_id is not null
        and %(tenant_id)s::text is null
)

-- name: list_suppressions
-- As list_recent_events, for the entries of a tenant, or of all. Includes entries that have ended.
with recursive {asked_tenants},
examined as (
    select s.*
    from tenant
    cross join lateral (
        select {suppression}
        from dispatcher.suppression
        where tenant_id = tenant.tenant_id
            and (%(since)s::timestamptz is null or created_at >= %(since)s)
            and (
                %(after_id)s::bigint is null
                or (created_at, suppression_id) < (%(after_created_at)s::timestamptz, %(after_id)s)
            )
        order by created_at desc, suppression_id desc
        limit case
            when %(kind)s::text is null and %(topic)s::text is null then %(limit)s::bigint
            else %(examined)s::bigint
        end
    ) as s
    order by s.created_at desc, s.id desc
    limit %(examined)s
),
wanted as (
    select *
    from examined
    where (%(kind)s::text is null or kind = %(kind)s)
        and (%(topic)s::text is null or topic = %(topic)s)
    order by created_at desc, id desc
    limit %(limit)s
)
select *
from wanted
union all
(
    select id, null, is_domain, kind, topic, created_at, expires_at, source_email_id, note, tenant_id
    from examined
    where {is_cut}
    order by created_at, id
    limit 1
)
order by created_at desc, id desc, recipient nulls last;

-- name: find_suppressions
-- The entries of a tenant, or of all, for recipients with the given hashes, with or without a topic, newest first.
with recursive {asked_tenants}
select s.*
from tenant
cross join lateral (
    select {suppression}
    from dispatcher.suppression
    where tenant_id = tenant.tenant_id
        and (address_hash = any(%(address_hashes)s::bytea[]) or recipient_hash = any(%(address_hashes)s::bytea[]))
) as s
order by s.id desc;

-- name: find_suppressions_of_email
-- The entries in force that suppress a recipient about whom there is an event of this email, for its topic or for all.
select {suppression}
from dispatcher.suppression
where tenant_id = %(tenant_id)s
    and (
        address_hash = any(array(select address_hash from dispatcher.email_event where email_id = %(email_id)s))
        or (
            recipient_hash = any(array(select address_hash from dispatcher.email_event where email_id = %(email_id)s))
            and topic = (select topic from dispatcher.email_log where email_id = %(email_id)s)
        )
    )
    and (expires_at is null or expires_at > now())
order by suppression_id;

-- name: list_suppressing_tenants
-- The first tenants that have entries; tenant_id is null.
with recursive {asked_tenants}
select tenant_id
from tenant
where tenant_id is not null
limit %(most)s;

-- name: export_suppressions
-- A page of one tenant's entries with ids below a given id, newest first: the id, and the cells of a line of an export.
select
    suppression_id, masked as recipient, reason as kind, note, expires_at, created_at, source_email_id,
    is_domain::text as is_domain, encode(coalesce(recipient_hash, address_hash), 'hex') as hash, topic
from dispatcher.suppression
where tenant_id = %(tenant_id)s
    and (%(before)s::bigint is null or suppression_id < %(before)s)
order by suppression_id desc
limit %(limit)s;

-- name: list_stopped
-- A page of one tenant's emails that failed because all their recipients are suppressed, oldest first. With `coalesce`
-- instead of `or`, PostgreSQL starts at the first email of the page in the index email_log_unfinished.
select e.email_id, c.recipients, e.topic
from dispatcher.email_log as e
join dispatcher.email_content as c using (email_id)
where e.status = 'failed'
    and e.error_type = 'suppressed'
    and e.tenant_id = %(tenant_id)s
    and e.dead_letter_discarded_at is null
    and e.email_id > coalesce(%(after)s::uuid, '00000000-0000-0000-0000-000000000000')
order by e.email_id
limit %(limit)s;

-- name: insert_unsubscribe
-- Suppresses a recipient for the topic of an email; for all emails of the tenant if the email has no topic, or if
-- `is_whole`. An entry that never expires does not change. Returns this topic. No row: the email does not exist.
with email as (
    select
        tenant_id, email_id, %(address_hash)s::bytea as address_hash,
        case when not %(is_whole)s::boolean then topic end as topic
    from dispatcher.email_log
    where email_id = %(email_id)s
),
suppressed as (
    insert into dispatcher.suppression as s (
        tenant_id, is_domain, masked, reason, source_email_id, address_hash, topic, recipient_hash
    )
    select tenant_id, false, %(masked)s, 'unsubscribe', email_id, {entry_key}
    from email
    on conflict (tenant_id, address_hash) do update
    set {new_suppression}
    where s.expires_at is not null
)
select topic
from email;

-- name: opt_out
-- Suppresses a phone number from which STOP was received, for every tenant that sent one of the last 1,000 SMS to this
-- number. If there is no such tenant, suppresses the number for the tenant `default`. A message that was already
-- handled in the last 30 days changes nothing. No rows.
with forgotten as (
    delete from dispatcher.inbound_message
    where received_at < now() - interval '30 days'
),
received as (
    insert into dispatcher.inbound_message (message_id)
    values (%(message_id)s)
    on conflict do nothing
    returning message_id
),
found as (
    select distinct e.tenant_id
    from dispatcher.find_recipients(
        '', substring(%(address_hash)s::bytea from 1 for 6), 'ffffffff-ffff-ffff-ffff-ffffffffffff',
        '00000000-0000-0000-0000-000000000000', 1000
    ) as r (email_id)
    join dispatcher.email_log as e using (email_id)
    where e.channel is not null
),
senders as (
    select tenant_id from found
    union all
    select 'default' where not exists (select from found)
)
insert into dispatcher.suppression as s (tenant_id, address_hash, is_domain, masked, reason)
select tenant_id, %(address_hash)s, false, %(masked)s, 'unsubscribe'
from senders
where exists (select from received)
on conflict (tenant_id, address_hash) do update
set {new_suppression}
where s.expires_at is not null;

-- name: opt_in
-- Removes the entries with the reason `unsubscribe` of a phone number from which START was received, for all tenants. A
-- message that was already handled changes nothing. No rows.
with received as (
    insert into dispatcher.inbound_message (message_id)
    values (%(message_id)s)
    on conflict do nothing
    returning message_id
)
delete from dispatcher.suppression
where address_hash = %(address_hash)s
    and reason = 'unsubscribe'
    and exists (select from received);
