-- name: insert_api_key
-- A new key; returns when it was made.
insert into dispatcher.api_key (
    key_id, tenant_id, name, secret_hash, scopes, sender_domains, sender_addresses, requests_per_second, recipients_per_day
)
values (
    %(key_id)s, %(tenant_id)s, %(name)s, %(secret_hash)s, %(scopes)s, %(sender_domains)s, %(sender_addresses)s,
    %(requests_per_second)s, %(recipients_per_day)s
)
returning created_at;

-- name: list_api_keys
-- Every key there ever was, oldest first. No row: nobody has made one yet.
select
    key_id, tenant_id, name, secret_hash, scopes, sender_domains, sender_addresses, requests_per_second,
    recipients_per_day, created_at, revoked_at
from dispatcher.api_key
order by created_at, key_id;

-- name: revoke_api_key
-- Ends a key; a row if it was alive.
update dispatcher.api_key
set revoked_at = clock_timestamp()
where key_id = %(key_id)s
    and revoked_at is null
returning key_id;

-- name: begin_recipient_day
-- Makes a key's row of today, and forgets its rows of last week. No rows.
with forgotten as (
    delete from dispatcher.api_key_day
    where key_id = %(key_id)s
        and day < (clock_timestamp() at time zone 'UTC')::date - 7
)
insert into dispatcher.api_key_day (key_id, day, recipient_count)
values (%(key_id)s, (clock_timestamp() at time zone 'UTC')::date, 0)
on conflict (key_id, day) do nothing;

-- name: take_recipients
-- Takes what is `wanted` of a key's quota of today, or all that is left of it, or nothing where that is less than
-- `needed`; returns the day, how many, and the seconds until that day ends. No row: today has no row yet.
with today as (
    select key_id, day, recipient_count
    from dispatcher.api_key_day
    where key_id = %(key_id)s
        and day = (clock_timestamp() at time zone 'UTC')::date
    for update
),
granted as (
    select
        key_id,
        day,
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
    d.day,
    g.granted,
    extract(epoch from (d.day + 1)::timestamp - (clock_timestamp() at time zone 'UTC'))::double precision;

-- name: return_recipients
-- Gives back what was taken of a day and not used. No rows.
update dispatcher.api_key_day
set recipient_count = greatest(0, recipient_count - %(returned)s)
where key_id = %(key_id)s
    and day = %(day)s;
