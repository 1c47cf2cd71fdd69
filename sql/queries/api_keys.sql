-- part: key_columns
-- A key without its hash, for people: the dataclass Key. `k` is the key.
'ed_' || k.key_id as key_id, k.name, k.tenant_id, k.scopes, k.sender_domains as from_domains,
k.sender_addresses as from_addresses, k.requests_per_second as per_second, k.recipients_per_day, k.lane, k.allowed_lanes,
k.is_test, k.created_at, k.revoked_at

-- name: insert_key
-- Inserts a new key, and audits this; returns its id and tenant.
with changed as (
    insert into dispatcher.api_key (
        key_id, tenant_id, name, secret_hash, scopes, sender_domains, sender_addresses, requests_per_second,
        recipients_per_day, lane, allowed_lanes, is_test
    )
    values (
        %(key_id)s, %(tenant_id)s, %(key_name)s, %(secret_hash)s, %(scopes)s, %(from_domains)s, %(from_addresses)s,
        %(per_second)s, %(recipients_per_day)s, %(lane)s, %(allowed_lanes)s, %(is_test)s
    )
    returning
        key_id, tenant_id, 'create_key' as act,
        jsonb_build_object(
            'key_id', 'ed_' || key_id, 'name', name, 'tenant', tenant_id, 'scopes', scopes, 'is_test', is_test
        ) as detail
),
{audited}
select 'ed_' || key_id as key_id, tenant_id
from changed;

-- name: list_keys
-- All keys, including revoked keys, oldest first. No row: no key was ever created.
select
    key_id, tenant_id, name, secret_hash, scopes, sender_domains, sender_addresses, requests_per_second,
    recipients_per_day, created_at, revoked_at, lane, allowed_lanes, is_test
from dispatcher.api_key
order by created_at, key_id;

-- name: list_shown_keys
-- The keys, or the key with this id, `ed_…`; oldest first. Revoked keys only if with_revoked is true.
select {key_columns}
from dispatcher.api_key as k
where (%(key_id)s::text is null or 'ed_' || k.key_id = %(key_id)s)
    and (%(with_revoked)s or k.revoked_at is null)
order by k.created_at, k.key_id;

-- name: revoke_key
-- Revokes a key, and audits this. No row: the key is unknown or already revoked.
with changed as (
    update dispatcher.api_key
    set revoked_at = clock_timestamp()
    where 'ed_' || key_id = %(key_id)s
        and revoked_at is null
    returning *, 'revoke_key' as act, jsonb_build_object('key_id', 'ed_' || key_id, 'tenant', tenant_id) as detail
),
{audited}
select {key_columns}
from changed as k;

-- name: begin_recipient_day
-- Creates a key's row of today, and deletes the key's rows that are older than a week. No rows.
with forgotten as (
    delete from dispatcher.api_key_day
    where key_id = %(key_id)s
        and day < (clock_timestamp() at time zone 'UTC')::date - 7
)
insert into dispatcher.api_key_day (key_id, day, recipient_count)
values (%(key_id)s, (clock_timestamp() at time zone 'UTC')::date, 0)
on conflict (key_id, day) do nothing;

-- name: take_recipients
-- Takes `wanted` recipients from a key's quota for today, or all that are left; none if fewer than `needed` are left.
-- Returns the day, the number taken, the seconds until the day ends, and how many are left. No row: the key has no row
-- for today yet.
with today as (
    select key_id, day, recipient_count
    from dispatcher.api_key_day
    where key_id = %(key_id)s
        and day = (clock_timestamp() at time zone 'UTC')::date
    for update
),
granted as (
    select
        key_id, day,
        case
            when %(quota)s - recipient_count < %(needed)s then 0
            else least(%(wanted)s, %(quota)s - recipient_count)
        end::integer as granted
    from today
)
update dispatcher.api_key_day as d
set recipient_count = d.recipient_count + g.granted
from granted as g
where d.key_id = g.key_id
    and d.day = g.day
returning
    d.day, g.granted,
    extract(epoch from (d.day + 1)::timestamp - (clock_timestamp() at time zone 'UTC'))::double precision,
    greatest(0, %(quota)s - d.recipient_count);

-- name: return_recipients
-- Returns unused recipients to the quota of a day. No rows.
update dispatcher.api_key_day
set recipient_count = greatest(0, recipient_count - %(returned)s)
where key_id = %(key_id)s
    and day = %(day)s;
