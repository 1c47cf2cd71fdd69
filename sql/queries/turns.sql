-- name: try_turn
-- True: what this name stands for is this session's to do until end_turn, or until the session ends.
select pg_try_advisory_lock(hashtext('email_dispatcher_' || %(name)s));

-- name: end_turn
-- Gives the turn to whoever comes next.
select pg_advisory_unlock(hashtext('email_dispatcher_' || %(name)s));

-- name: end_if_idle
-- PostgreSQL ends this session when it says nothing for so long.
select set_config('idle_session_timeout', (%(seconds)s * 1000)::integer::text || 'ms', false);

-- name: share_turn
-- Until end_shared_turn, or until the session ends, find_shared_turn finds it.
select pg_advisory_lock_shared(hashtext('email_dispatcher_' || %(name)s));

-- name: end_shared_turn
-- Takes share_turn back.
select pg_advisory_unlock_shared(hashtext('email_dispatcher_' || %(name)s));

-- name: find_shared_turn
-- A row: another session has this name.
select 1
from pg_locks
where locktype = 'advisory'
    and objid::bigint = hashtext('email_dispatcher_' || %(name)s)::bigint & 4294967295
    and database = (select oid from pg_database where datname = current_database())
    and pid <> pg_backend_pid()
limit 1;
