-- The sessions of the operators' page (docs/ops-page.md).

-- name: insert_ops_session
-- Stores a new session, and deletes up to 1,000 sessions that have expired. No rows.
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
)
insert into dispatcher.ops_session (token_hash, key_id, name, tenant_id, may_act)
values (%(token_hash)s, %(key_id)s, %(name)s, %(tenant_id)s, %(may_act)s);

-- name: find_ops_session
-- A session that has not expired, and the seconds since it was last used. No row: the session is unknown or has
-- expired.
select
    key_id, name, tenant_id, may_act,
    extract(epoch from clock_timestamp() - seen_at)::double precision
from dispatcher.ops_session
where token_hash = %(token_hash)s
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
