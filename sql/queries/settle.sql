-- name: terminate_sessions
-- Ends what a dead worker's sessions may still be executing; zero rows mean that nothing of it can commit any more.
select pg_terminate_backend(pid)
from pg_stat_activity
where application_name = %(application_name)s
    and datname = current_database()
    and pid <> pg_backend_pid();

-- name: find_leases
-- The leases of a worker, as find_expiring finds leases. No row: it has none.
select email_id, lease_token, locked_by, locked_until, locked_until < clock_timestamp(), attempt_base
from dispatcher.email_log
where status = 'sending'
    and locked_by = %(worker)s;

-- name: find_rescued
-- The emails of a worker that a rescue holds and that have not changed since, with the token of the lease that it took away.
select email_id, rescued_token
from dispatcher.email_log
where status = 'held'
    and rescued_from = %(worker)s
    and lease_token = rescued_token + 1
    and dead_letter_discarded_at is null;

-- name: recover_rescued
-- Undoes rescues of emails that have not changed since: nothing was accepted under the leases that were taken away, and
-- nothing will be. A discarded email stays as the operator left it. Pending and due again. attempt_base gives the attempt
-- back; attempt_count stays, because a dead letter is known by it. Audited. Returns a row per email that it moved.
with recovered as (
    update dispatcher.email_log as e
    set
        status = 'pending',
        attempt_base = e.attempt_base + 1,
        was_uncertain = e.rescued_in_doubt,
        rescued_token = null,
        last_error = null,
        error_type = null,
        publish_due_at = clock_timestamp(),
        dead_letter_due_at = null
    where e.email_id = any(%(email_ids)s)
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and (
            (e.email_id, e.rescued_token, e.status) in (
                select w.email_id, w.lease_token, 'held'
                from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[]) as w (email_id, lease_token)
            )
            and e.lease_token = e.rescued_token + 1
            and e.dead_letter_discarded_at is null
        ) is true
    returning e.email_id, e.correlation_id, e.attempt_count
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select
        'recovery', 'recover', 'The worker or its ledger came back: nothing had left when the lease was taken away.',
        email_id, jsonb_build_object('attempts', attempt_count, 'worker', %(worker)s::text)
    from recovered
)
select email_id, correlation_id, pg_notify('email_dispatcher_due', '')
from recovered;

-- name: find_attempt_bases
-- How many attempts emails had when they were last replayed; those that never were are left out.
select email_id, attempt_base
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and attempt_base > 0;

-- name: note_crashes
-- Emails that a worker was rendering when it died, one crash more: pending and due again like every other of its leases,
-- the attempt unburnt; but failed, with a dead letter due, once that many workers died of it.
-- Returns a row per email that it moved.
with free as (
    select email_id
    from dispatcher.email_log
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
        and (
            (email_id, lease_token, status, locked_by) in (
                select w.email_id, w.lease_token, 'sending', %(worker)s::text
                from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[]) as w (email_id, lease_token)
            )
        ) is true
    for no key update skip locked
)
update dispatcher.email_log as e
set
    crash_count = e.crash_count + 1,
    status = case when e.crash_count + 1 >= %(most_crashes)s then 'failed' else 'pending' end,
    attempt_count = e.attempt_count - 1,
    lease_token = e.lease_token + 1,
    locked_by = null,
    locked_until = 'epoch',
    last_error = %(error)s,
    error_type = %(error_type)s,
    publish_due_at = case when e.crash_count + 1 < %(most_crashes)s then clock_timestamp() end,
    dead_letter_due_at = case when e.crash_count + 1 >= %(most_crashes)s then clock_timestamp() end
where e.email_id = any(array(select email_id from free))
    and e.email_id between %(lowest_id)s and %(highest_id)s
returning e.email_id, e.correlation_id, e.status, e.crash_count;

-- name: find_expiring
-- Leases that have run out by PostgreSQL's clock, or do so within some seconds: of these workers, or of all others. This
-- look comes before any look into a ledger.
select email_id, lease_token, locked_by, locked_until, locked_until < clock_timestamp(), attempt_base
from dispatcher.email_log
where status = 'sending'
    and (locked_by = any(%(workers)s)) = %(is_theirs)s
    and locked_until < clock_timestamp() + %(within_seconds)s * interval '1 second';

-- name: release_found
-- Gives back leases that find_leases or find_expiring found and under which nothing left nor can leave: pending and due again,
-- the attempt unburnt. One that came to something since, a renewal included, is left alone. Returns a row per email that it
-- moved.
update dispatcher.email_log as e
set
    status = 'pending',
    attempt_count = e.attempt_count - 1,
    lease_token = e.lease_token + 1,
    locked_by = null,
    locked_until = 'epoch',
    publish_due_at = clock_timestamp()
where e.email_id = any(%(email_ids)s)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and (
        (e.email_id, e.lease_token, e.locked_until, e.status) in (
            select w.email_id, w.lease_token, w.expired_at, 'sending'
            from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[], %(expired_ats)s::timestamptz[])
                as w (email_id, lease_token, expired_at)
        )
    ) is true
returning e.email_id;
