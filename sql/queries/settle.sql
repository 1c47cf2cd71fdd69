-- name: terminate_sessions
-- Ends what a dead worker's sessions may still be executing; zero rows mean that nothing of it can commit any more.
select pg_terminate_backend(pid)
from pg_stat_activity
where application_name = %(application_name)s
    and datname = current_database()
    and pid <> pg_backend_pid();

-- name: release_dead
-- Gives back every lease that a dead worker still has once its in-flight ledger is recorded: nothing of those emails left,
-- or their last attempt was answered and recorded, and nobody is there to make the next one.
-- Returns a row per email that it moved.
update email_log
set
    status = 'pending',
    attempt_count = attempt_count - 1,
    lease_token = lease_token + 1,
    locked_by = null,
    locked_until = 'epoch',
    publish_due_at = clock_timestamp()
where status = 'sending'
    and locked_by = %(worker)s
returning email_id;

-- name: find_attempt_bases
-- How many attempts emails had when they were last replayed; those that never were are left out.
select email_id, attempt_base
from email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and attempt_base > 0;
