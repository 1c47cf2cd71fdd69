-- name: take_named_locks
-- Takes those of the named locks that are free. A row per lock: its name, and whether this session has the lock until
-- release_named_lock or the end of the session. False: a process of the release before took the lock at the same
-- moment; release the lock. A lock without a row has another holder.
-- The session also takes two advisory locks: (pid, key) shows that the session is alive, and the lock's name keeps
-- processes of the release before away. If a stranger's session has the latter, no such process can take it.
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
returning
    l.name,
    pg_try_advisory_lock(l.pid, l.key)
    and (
        case
            when l.name = 'relay_ready' then pg_try_advisory_lock_shared(hashtext('email_dispatcher_' || l.name))
            else pg_try_advisory_lock(hashtext('email_dispatcher_' || l.name))
        end
        or exists (select from dispatcher.advisory_lock_holders(l.name, 'update') where not is_ours)
    );

-- name: release_named_lock
-- Releases the named lock. Zero rows: this session does not have the lock.
with released as (
    delete from dispatcher.named_lock
    where name = %(name)s
        and pid = pg_backend_pid()
    returning name, pid, key
)
select
    pg_advisory_unlock(pid, key),
    case
        when name = 'relay_ready' then pg_advisory_unlock_shared(hashtext('email_dispatcher_' || name))
        else pg_advisory_unlock(hashtext('email_dispatcher_' || name))
    end
from released;

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
