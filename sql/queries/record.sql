-- name: record
-- Writes what became of attempts, in one statement: closes or prolongs each lease, appends the attempt, completes
-- idempotency, counts the hour, and marks dead letters due.
-- Returns the ids whose lease was still ours. An id that is missing was lost: nothing of it was overwritten, but its attempt
-- is on record; an acceptance is taken whoever holds the lease, because it proves that the email was sent.
-- Ids and instants travel in binary: as text, writing and reading them costs five times as much.
-- If a rescue took this very lease and holds the email, unchanged since, a definite no counts as if the lease still lasted:
-- nothing was accepted under it. But there is no retry under it; the email is pending instead. That is audited. An uncertain
-- outcome confirms the rescue, so that nothing undoes it later. The ids of such emails are not returned: their lease is lost.
-- A result with expired_at is recorded for a living owner whose lease ran out: only if nothing came of that lease since.
-- Its plan is kept (see lease.sql): `= any` and `is true` leave no way to the emails but their ids, and an array of one
-- tenant none to a key but its look-up, where a merge join would read all keys.
with result as (
    select *
    from unnest(
        %(email_ids)b::uuid[],
        %(lease_tokens)s::bigint[],
        %(statuses)s::text[],
        %(lease_seconds)s::double precision[],
        %(attempt_numbers)s::integer[],
        %(started_ats)b::timestamptz[],
        %(finished_ats)b::timestamptz[],
        %(outcomes)s::text[],
        %(error_types)s::text[],
        %(errors)s::text[],
        %(providers)s::text[],
        %(provider_codes)s::text[],
        %(provider_message_ids)s::text[],
        %(expired_ats)s::timestamptz[]
    ) as t (
        email_id, lease_token, status, lease_seconds, attempt_number, started_at, finished_at, outcome, error_type,
        error, provider, provider_code, provider_message_id, expired_at
    )
),
closed as (
    update dispatcher.email_log as e
    set
        status = case
            when e.status <> 'held' or r.status = 'sent' then r.status
            when r.outcome = 'uncertain' then 'held'
            when r.status = 'sending' then 'pending'
            else r.status
        end,
        attempt_count = e.attempt_count + (r.status = 'sending' and e.status = 'sending')::integer,
        locked_by = case when r.status = 'sending' then e.locked_by end,
        locked_until = case
            when r.status = 'sending' and e.status = 'sending'
                then clock_timestamp() + r.lease_seconds * interval '1 second'
            else 'epoch'
        end,
        last_error = r.error,
        error_type = r.error_type,
        provider = r.provider,
        provider_message_id = coalesce(r.provider_message_id, e.provider_message_id),
        was_uncertain = case
            when e.status = 'held' and r.outcome in ('deferred', 'rejected') then e.rescued_in_doubt
            else e.was_uncertain or r.outcome = 'uncertain'
        end,
        rescued_token = null,
        sent_at = case r.status when 'sent' then clock_timestamp() end,
        publish_due_at = case
            when e.status = 'held' and r.outcome = 'uncertain' then null
            when r.status = 'pending' or (r.status = 'sending' and e.status = 'held') then clock_timestamp()
        end,
        dead_letter_due_at = case
            when e.status = 'held' and r.outcome = 'uncertain' then e.dead_letter_due_at
            when r.status in ('failed', 'held') then clock_timestamp()
        end
    from result as r
    where e.email_id = any(%(email_ids)b)
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and e.email_id = r.email_id
        and (
            (e.status = 'sending' and e.lease_token = r.lease_token)
            or (r.status = 'sent' and e.status <> 'sent')
            or (
                e.status = 'held'
                and e.rescued_token = r.lease_token
                and e.lease_token = r.lease_token + 1
                and e.dead_letter_discarded_at is null
            )
        ) is true
        and (r.expired_at is null or (e.lease_token = r.lease_token and e.locked_until = r.expired_at))
    returning
        e.email_id, e.tenant_id, e.message_key, r.status, r.outcome, r.provider, e.attempt_count,
        r.status <> 'sent' and e.lease_token <> r.lease_token as was_rescued
),
completed as (
    update dispatcher.email_idempotency as k
    set completed_at = clock_timestamp()
    from closed as c
    where c.status = 'sent'
        and k.tenant_id = any(array[c.tenant_id])
        and k.message_key = c.message_key
),
attempted as (
    insert into dispatcher.email_attempt (
        email_id, attempt_number, worker, provider, started_at, finished_at, outcome, error_type, error, provider_code
    )
    select
        email_id, attempt_number, %(worker)s, provider, started_at, finished_at, outcome, error_type, error,
        provider_code
    from result
    where expired_at is null
        or email_id in (select email_id from closed)
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select
        'recovery', 'recover', 'The worker came back: the provider had not accepted it when the lease was taken away.',
        email_id, jsonb_build_object('attempts', attempt_count, 'worker', %(worker)s::text, 'outcome', outcome)
    from closed
    where was_rescued
        and outcome <> 'uncertain'
),
counted as (
    insert into dispatcher.email_hourly (hour, provider, outcome, slot, email_count)
    select date_trunc('hour', now(), 'UTC'), provider, outcome, %(slot)s, count(*)
    from closed
    group by provider, outcome
    order by provider, outcome
    on conflict (hour, provider, outcome, slot) do update
    set email_count = email_hourly.email_count + excluded.email_count
)
select email_id
from closed
where not was_rescued;

-- name: find_attempt
-- A row: this batch was committed although its answer never reached us, because a batch commits as a whole.
-- By its start as well: attempts are numbered anew when a person replays an email.
select 1
from dispatcher.email_attempt
where email_id = %(email_id)s
    and attempt_number = %(attempt_number)s
    and started_at = %(started_at)s
    and worker = %(worker)s
limit 1;
