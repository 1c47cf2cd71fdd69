-- name: terminate_sessions
-- Terminates the sessions of a dead worker. Zero rows: no session is left, so the worker can commit nothing more. Every
-- role may give its session any name, so the session of a role that cannot update emails does not count.
select pg_terminate_backend(pid)
from pg_stat_activity
where application_name = %(application_name)s
    and datname = current_database()
    and pid <> pg_backend_pid()
    and has_table_privilege(usesysid, 'dispatcher.email_log', 'update');

-- name: find_recovered
-- The emails that a recovery took from a worker and set to `held`, with the tokens of the lost leases.
select email_id, rescued_token
from dispatcher.email_log
where status = 'held'
    and rescued_from = %(worker)s
    and lease_token = rescued_token + 1
    and dead_letter_discarded_at is null;

-- name: revert_recovery
-- Undoes the recovery of emails that no provider has accepted or can still accept under the lost leases, except emails
-- that have changed since or were discarded. attempt_base is increased, so the attempt does not count; attempt_count
-- stays, because it identifies the dead letter.
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
    where {is_e_given}
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
        'recovery', 'recover', 'The worker or its ledger returned, and showed that the email was not sent under the lost lease.',
        email_id, jsonb_build_object('attempts', attempt_count, 'worker', %(worker)s::text)
    from recovered
)
select
    email_id,
    correlation_id,
    case when not exists (select from dispatcher.relay_polls) then pg_notify('email_dispatcher_due', '') end
from recovered;

-- part: retry_history
-- How many attempts an email had before its last replay or redelivery, for how many seconds it has been pinned to a
-- provider, and its own retry limits (see lease). Seconds are subtracted and not instants: an infinite instant, or an
-- interval out of range, in one row would make PostgreSQL refuse the statement.
attempt_base, (extract(epoch from clock_timestamp()) - extract(epoch from pinned_at))::double precision,
case
    when max_attempts is not null or coalesce(redeliver_seconds, %(redeliver_seconds)s) > 0 then array[
        max_attempts,
        least(
            extract(epoch from coalesce(due_since, created_at)) + coalesce(redeliver_seconds, %(redeliver_seconds)s),
            extract(epoch from expires_at)
        ) - extract(epoch from clock_timestamp()),
        redelivery_count
    ]::double precision[]
end

-- name: find_histories
-- The retry_history of each email. If an id is missing in the result, there is no such email.
select email_id, {retry_history}
from dispatcher.email_log
where {is_given};

-- name: note_crashes
-- Counts one more crash for emails that a worker was rendering when the worker died; the attempt is not counted. An
-- email that has crashed most_crashes workers becomes failed, or held if an earlier attempt may have been accepted.
with free as (
    select email_id
    from dispatcher.email_log
    where {is_given}
        and (
            (email_id, lease_token, status, locked_by) in (
                select w.email_id, w.lease_token, 'sending', %(worker)s::text
                from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[]) as w (email_id, lease_token)
            )
        ) is true
    for no key update skip locked
),
changed as (
    update dispatcher.email_log as e
    set
        crash_count = e.crash_count + 1,
        status = case
            when e.crash_count + 1 < %(most_crashes)s then 'pending'
            when e.pinned_at is null then 'failed'
            else 'held'
        end,
        attempt_count = e.attempt_count - 1,
        lease_token = e.lease_token + 1,
        locked_by = null,
        locked_until = 'epoch',
        last_error = %(error)s,
        error_type = %(error_type)s,
        publish_due_at = case when e.crash_count + 1 < %(most_crashes)s then clock_timestamp() end,
        settled_at = case when e.crash_count + 1 >= %(most_crashes)s then clock_timestamp() else e.settled_at end,
        dead_letter_due_at = case
            when e.crash_count + 1 >= %(most_crashes)s and e.channel is distinct from 'test' then clock_timestamp()
        end
    where {is_free}
    returning
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.status, e.crash_count, e.error_type as reason,
        case when e.status in ('failed', 'held') then e.status end as kind, null as provider
),
{announced}
select email_id, correlation_id, status, crash_count
from changed;

-- name: find_expiring
-- Leases that have expired by PostgreSQL's clock, or expire soon. Read them before the ledger of their worker.
select
    email_id, lease_token, locked_by, locked_until, locked_until < clock_timestamp(),
    {retry_history}
from dispatcher.email_log
where status = 'sending'
    and (locked_by = any(%(workers)s)) = %(is_theirs)s
    and locked_until < clock_timestamp() + %(within_seconds)s * interval '1 second';

-- name: release_found
-- Releases leases that find_leases or find_expiring found and that have not changed since. Under them, no email was
-- sent or can still be sent; the attempt is not counted.
update dispatcher.email_log as e
set
    status = 'pending',
    attempt_count = e.attempt_count - 1,
    lease_token = e.lease_token + 1,
    locked_by = null,
    locked_until = 'epoch',
    publish_due_at = clock_timestamp()
where {is_e_given}
    and (
        (e.email_id, e.lease_token, e.locked_until, e.status) in (
            select w.email_id, w.lease_token, w.expired_at, 'sending'
            from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[], %(expired_ats)s::timestamptz[])
                as w (email_id, lease_token, expired_at)
        )
    ) is true
returning e.email_id;
