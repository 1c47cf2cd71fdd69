-- The sessions of the operators' page (docs/ops-page.md).

-- name: insert_ops_session
-- Stores and audits a new session, and deletes up to 1,000 sessions that have expired. No rows.
with expired as (
    select token_hash
    from dispatcher.ops_session
    where created_at < clock_timestamp() - %(session_seconds)s * interval '1 second'
    order by created_at
    limit 1000
),
deleted as (
    delete from dispatcher.ops_session
    where token_hash in (select token_hash from expired)
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    values (
        %(name)s, 'sign_in', null,
        jsonb_strip_nulls(jsonb_build_object('tenant', %(tenant_id)s::text, 'may_act', %(may_act)s::boolean))
    )
)
insert into dispatcher.ops_session (token_hash, key_id, name, tenant_id, may_act)
values (%(token_hash)s, %(key_id)s, %(name)s, %(tenant_id)s, %(may_act)s);

-- name: find_ops_sessions
-- The sessions that have not expired, the seconds since each was last used, and the seconds until it expires unless it
-- is used again. No row for a session that is unknown or has expired.
select
    token_hash, key_id, name, tenant_id, may_act,
    extract(epoch from clock_timestamp() - seen_at)::double precision,
    extract(
        epoch from least(
            created_at + %(session_seconds)s * interval '1 second', seen_at + %(idle_seconds)s * interval '1 second'
        ) - clock_timestamp()
    )::double precision
from dispatcher.ops_session
where token_hash = any(%(token_hashes)s::bytea[])
    and created_at >= clock_timestamp() - %(session_seconds)s * interval '1 second'
    and seen_at >= clock_timestamp() - %(idle_seconds)s * interval '1 second';

-- name: touch_ops_session
-- Records that a session is in use. No rows.
update dispatcher.ops_session
set seen_at = clock_timestamp()
where token_hash = %(token_hash)s;

-- name: delete_ops_session
-- Ends a session. No rows.
delete from dispatcher.ops_session
where token_hash = %(token_hash)s;

-- name: use_sign_in
-- Records that a sign-in came back from the issuer, and deletes older ones. No row: it had come back before.
with expired as (
    delete from dispatcher.ops_sign_in
    where used_at < clock_timestamp() - interval '1 hour'
)
insert into dispatcher.ops_sign_in (state_hash)
values (%(state_hash)s)
on conflict (state_hash) do nothing
returning state_hash;
