-- name: take_named_locks
-- Takes those of the named locks that are free, until release_named_lock or the end of the session. A row per
-- lock: its name, and true. A lock without a row has another holder. The advisory lock (pid, key) shows that the session
-- is alive.
-- The row is replaced only if it is still the row that the snapshot shows, because its holder is checked only once.
insert into dispatcher.named_lock as l (name, pid, key)
select wanted.name, pg_backend_pid(), (random() * 2147483646)::integer
from unnest(%(names)s::text[]) as wanted (name)
where dispatcher.named_lock_holder(wanted.name) is null
on conflict (name) do update
set
    pid = excluded.pid,
    key = excluded.key,
    taken_at = excluded.taken_at
where l.key = (select seen.key from dispatcher.named_lock as seen where seen.name = l.name)
returning l.name, pg_try_advisory_lock(l.pid, l.key);

-- name: release_named_lock
-- Releases the named lock. Zero rows: this session does not have the lock.
delete from dispatcher.named_lock
where name = %(name)s
    and pid = pg_backend_pid()
returning pg_advisory_unlock(pid, key);

-- name: is_held_by_another
-- A row: another session has the named lock.
select 1
where dispatcher.named_lock_holder(%(name)s) <> pg_backend_pid();

-- name: try_reading_lock
-- True: no other session of a role that may read emails has this lock. A stranger's session does not count.
select
    pg_try_advisory_lock(hashtext('email_dispatcher_' || %(name)s))
    or exists (select from dispatcher.advisory_lock_holders(%(name)s, 'select') where not is_ours);

-- name: release_reading_lock
-- Releases the lock of try_reading_lock.
select pg_advisory_unlock(hashtext('email_dispatcher_' || %(name)s));
