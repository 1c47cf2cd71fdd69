-- name: read_suppressions
-- The hashes of all valid entries, a row per tenant: the first eight bytes of each, in order and joined; whether a domain
-- is among them; and the oldest transaction that is still running, from which read_changed_suppressions continues.
-- Without entries, one row without a tenant.
select
    s.tenant_id,
    coalesce(string_agg(substring(s.address_hash for 8), ''::bytea order by s.address_hash), ''::bytea),
    coalesce(bool_or(s.is_domain), false),
    pg_snapshot_xmin(pg_current_snapshot())::text
from (values (true)) as always
left join dispatcher.suppression as s on s.expires_at is null or s.expires_at > now()
group by s.tenant_id;

-- name: read_changed_suppressions
-- As read_suppressions, but only the entries that were written by a transaction that was not yet visible when `since`
-- was read. It may repeat entries. A database that was restored from a dump has entries of transactions that are yet to
-- come; read_suppressions has read these.
select
    s.tenant_id,
    coalesce(string_agg(substring(s.address_hash for 8), ''::bytea order by s.address_hash), ''::bytea),
    coalesce(bool_or(s.is_domain), false),
    pg_snapshot_xmin(pg_current_snapshot())::text
from (values (true)) as always
left join dispatcher.suppression as s
    on s.changed_in >= %(since)s::text::xid8
    and s.changed_in < pg_snapshot_xmax(pg_current_snapshot())
group by s.tenant_id;

-- name: find_suppressed
-- Which of these recipients are suppressed for their email's tenant, and why. An email with ignore_suppression has no
-- row. address_hashes has the hash of each recipient's address and of its domain; positions says which recipient.
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
order by w.email_id, w.position, s.is_domain;

-- name: insert_suppressions
-- Suppresses recipients of one tenant, for an operator; audited without addresses. If a recipient already has an entry
-- that lasts at least as long as the new one, that entry does not change. Returns the number of entries that are new or
-- changed. One row.
with input as (
    select *
    from unnest(
        %(address_hashes)b::bytea[],
        %(are_domains)b::boolean[],
        %(masked)b::text[],
        %(reasons)b::text[],
        %(notes)b::text[],
        %(expire_ats)b::timestamptz[]
    ) as t (address_hash, is_domain, masked, reason, note, expires_at)
),
written as (
    insert into dispatcher.suppression as s (tenant_id, address_hash, is_domain, masked, reason, note, expires_at)
    select %(tenant_id)s, address_hash, is_domain, masked, reason, note, expires_at
    from input
    order by address_hash
    on conflict (tenant_id, address_hash) do update
    set
        masked = excluded.masked,
        reason = excluded.reason,
        source_email_id = null,
        source_event_key = null,
        note = excluded.note,
        created_at = excluded.created_at,
        expires_at = excluded.expires_at,
        changed_in = excluded.changed_in
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
select count(*)::integer
from written;

-- name: delete_suppressions
-- Removes entries of one tenant, for an operator; audited without addresses. Returns a row per removed entry.
with removed as (
    delete from dispatcher.suppression
    where tenant_id = %(tenant_id)s
        and address_hash = any(%(address_hashes)s::bytea[])
    returning suppression_id, reason, created_at
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    select
        %(actor)s, 'unsuppress', %(reason)s,
        jsonb_build_object(
            'tenant', %(tenant_id)s::text,
            'suppression_id', suppression_id,
            'was', reason,
            'since', created_at
        )
    from removed
)
select suppression_id, reason
from removed;

-- name: list_suppressions
-- A page of one tenant's entries, newest first, with ids below a given id. Expired entries are listed, too.
select
    suppression_id, tenant_id, masked, is_domain, reason, source_email_id, note, created_at, expires_at, address_hash
from dispatcher.suppression
where tenant_id = %(tenant_id)s
    and (%(reason)s::text is null or reason = %(reason)s)
    and (%(address_hashes)s::bytea[] is null or address_hash = any(%(address_hashes)s))
    and (%(before)s::bigint is null or suppression_id < %(before)s)
order by suppression_id desc
limit %(limit)s;

-- name: list_stopped
-- A page of one tenant's failed emails that were not sent because all their recipients are suppressed, with their
-- recipients, oldest first, with ids above a given id. Emails that an operator discarded are left out. With `coalesce`
-- and not `or`, each page starts at its first email in the index email_log_unfinished.
select e.email_id, c.recipients
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
-- Suppresses a recipient who has unsubscribed, for the tenant of the email. An entry without an end stays as it is. No row:
-- the email does not exist.
with email as (
    select tenant_id, email_id
    from dispatcher.email_log
    where email_id = %(email_id)s
),

suppressed as (
    insert into dispatcher.suppression as s (tenant_id, address_hash, is_domain, masked, reason, source_email_id)
    select tenant_id, %(address_hash)s, false, %(masked)s, 'unsubscribe', email_id
    from email
    on conflict (tenant_id, address_hash) do update
    set
        masked = excluded.masked,
        reason = excluded.reason,
        source_email_id = excluded.source_email_id,
        source_event_key = null,
        note = null,
        created_at = excluded.created_at,
        expires_at = null,
        changed_in = excluded.changed_in
    where s.expires_at is not null
)

select true
from email;

-- name: opt_out
-- Suppresses a number that has answered STOP, for every tenant that has sent it one of the last 1000 SMS, or for the
-- tenant default if none is known. A message that was handled in the last 30 days changes nothing. No rows.
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
set
    masked = excluded.masked,
    reason = excluded.reason,
    source_email_id = null,
    source_event_key = null,
    note = null,
    created_at = excluded.created_at,
    expires_at = null,
    changed_in = excluded.changed_in
where s.expires_at is not null;

-- name: opt_in
-- Ends the suppression of a number that has answered START, unless it has another reason. A message that was handled
-- before changes nothing. No rows.
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
