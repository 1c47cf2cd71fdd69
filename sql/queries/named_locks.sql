-- name: try_named_lock
-- True: this session holds the named lock until release_named_lock, or until the session ends.
select pg_try_advisory_lock(hashtext('email_dispatcher_' || %(name)s));

-- name: release_named_lock
-- Releases the named lock.
select pg_advisory_unlock(hashtext('email_dispatcher_' || %(name)s));

-- name: set_idle_timeout
-- PostgreSQL ends this session after this many seconds without a statement.
select set_config('idle_session_timeout', (%(seconds)s * 1000)::integer::text || 'ms', false);

-- name: hold_shared_lock
-- Takes a shared named lock until release_shared_lock, or until the session ends. Other sessions see it with
-- find_other_lock_holder.
select pg_advisory_lock_shared(hashtext('email_dispatcher_' || %(name)s));

-- name: release_shared_lock
-- Releases the lock of hold_shared_lock.
select pg_advisory_unlock_shared(hashtext('email_dispatcher_' || %(name)s));

-- name: find_other_lock_holder
-- A row: another session holds the named lock.
select 1
from pg_locks
where locktype = 'advisory'
    and objid::bigint = hashtext('email_dispatcher_' || %(name)s)::bigint & 4294967295
    and database = (select oid from pg_database where datname = current_database())
    and pid <> pg_backend_pid()
limit 1;
