-- name: record
-- Records the results of attempts in one statement: closes or extends each lease, inserts the attempt, increases the
-- hourly count, and makes dead letters due. An email whose recipients are all suppressed or kept back has no dead
-- letter (nor has an email of a test key), because nothing is wrong with the dispatcher or the provider.
-- Returns the ids of the emails for which this worker still had a lease. If an id is missing in the result, the lease
-- was lost: the attempt is recorded, but the email is not changed. An acceptance is the exception: it makes the email
-- `sent` under any lease, because it proves that the email was sent.
-- Ids and instants are sent in binary, because to write and read them as text would take five times as long.
-- If recovery took this lease and set the email to `held`, and the email has not changed since, a deferral or rejection
-- still changes the email, because nothing was accepted under the lease. A deferred email becomes pending, because the
-- worker cannot retry under a lost lease. These changes are audited. An uncertain outcome confirms the recovery, so no
-- later statement undoes the recovery. The ids of these emails are not returned, because their lease is lost.
-- A deferral does not extend the lease of an email that an event proves to be accepted. No retry begins, and the email
-- is settled after its lease has ended (see events.sql).
-- A pinned result pins the email to its provider, because this provider may have accepted the email under an
-- idempotency key. The pin begins when the first pinned attempt began. If the worker's clock and PostgreSQL's clock
-- differ, the earlier time counts, because the provider forgets the key after some time.
-- For a redelivery (`waiting`, with wait_seconds), the lease ends. The relay makes the email due later (see
-- timing.sql). Only the attempts after that count towards the maximum. This also applies to an email that recovery made
-- `held`: the email waits, and its dead letter is stale.
-- The relay records a result with expired_at for a frozen worker whose lease expired. The result changes the email only
-- if the lease has not changed since.
-- PostgreSQL keeps the plan (see lease.sql). Because of `= any` and `is true`, the plan can find emails only by id.
-- If the feed of events is on, every final status adds an event. PostgreSQL looks up once per batch whether the feed is
-- on. An uncertain outcome of an email that recovery already made `held` changes no status, so it adds no event.
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
        %(expired_ats)s::timestamptz[],
        %(are_pinned)s::boolean[],
        %(wait_seconds)s::double precision[]
    ) as t (
        email_id, lease_token, status, lease_seconds, attempt_number, started_at, finished_at, outcome, error_type,
        error, provider, provider_code, provider_message_id, expired_at, is_pinned, wait_seconds
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
        pinned_at = case when r.is_pinned then coalesce(e.pinned_at, least(r.started_at, clock_timestamp())) end,
        wait_until = clock_timestamp() + r.wait_seconds * interval '1 second',
        wait_reason = case when r.status = 'waiting' then 'redelivery' else e.wait_reason end,
        attempt_base = case when r.status = 'waiting' then e.attempt_count else e.attempt_base end,
        redelivery_count = e.redelivery_count + (r.status = 'waiting')::integer,
        rescued_token = null,
        sent_at = case r.status when 'sent' then clock_timestamp() end,
        settled_at = case
            when r.status in ('failed', 'held') and not (e.status = 'held' and r.outcome = 'uncertain')
                then clock_timestamp()
            else e.settled_at
        end,
        publish_due_at = case
            when e.status = 'held' and r.outcome = 'uncertain' then null
            when r.status = 'pending' or (r.status = 'sending' and e.status = 'held') then clock_timestamp()
        end,
        dead_letter_due_at = case
            when e.status = 'held' and r.outcome = 'uncertain' then e.dead_letter_due_at
            when r.error_type in ('suppressed', 'kept_back') or e.channel = 'test' then null
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
        and (r.status <> 'sending' or e.proven_by is null)
    returning
        e.email_id, e.tenant_id, e.message_key, r.status, r.outcome, r.provider, e.attempt_count,
        r.status <> 'sent' and e.lease_token <> r.lease_token as was_rescued,
        e.status as new_status, e.correlation_id, r.error_type, r.provider_code
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
        'recovery', 'recover', 'The worker returned and recorded that the provider did not accept the email.',
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
),
announced as (
    insert into dispatcher.outgoing_event (
        kind, email_id, tenant_id, message_key, correlation_id, reason, provider, code
    )
    select
        case when error_type = 'suppressed' then 'suppressed' else new_status end,
        email_id, tenant_id, message_key, correlation_id, error_type, provider, provider_code
    from closed
    where (select is_on from dispatcher.outgoing_feed)
        and new_status in ('sent', 'failed', 'held')
        and not (was_rescued and outcome = 'uncertain')
)
select email_id
from closed
where not was_rescued;

-- name: record_accepted
-- As record, for acceptances by one provider (see Result.is_acceptance). Nearly all results are acceptances, and this
-- statement takes half as long as record. errors is null if no acceptance has a text.
-- No lease is compared, because an acceptance makes an email `sent` under any lease (see record).
-- width_bucket returns the position of an email's id (see lease). PostgreSQL sometimes plans a join so that it compares
-- every result with every email.
-- An attempt is stored in the email's row. It gets a row in email_attempt only if the email was `sent` before, or if
-- another attempt has begun since (see the view every_attempt).
-- Returns the ids of the emails that were `sent` before, or do not exist. No row: every email became `sent`.
with closed as (
    update dispatcher.email_log
    set
        status = 'sent',
        locked_by = null,
        locked_until = 'epoch',
        last_error = (%(errors)s::text[])[width_bucket(email_id, %(email_ids)b::uuid[])],
        error_type = null,
        provider = %(provider)s,
        provider_message_id = coalesce(
            (%(provider_message_ids)s::text[])[width_bucket(email_id, %(email_ids)b::uuid[])], provider_message_id
        ),
        pinned_at = null,
        wait_until = null,
        rescued_token = null,
        sent_at = clock_timestamp(),
        attempt_worker = case
            when attempt_count = (%(attempt_numbers)s::integer[])[width_bucket(email_id, %(email_ids)b::uuid[])]
                then %(worker)s
        end,
        attempt_started_at = (%(started_ats)b::timestamptz[])[width_bucket(email_id, %(email_ids)b::uuid[])],
        attempt_finished_at = (%(finished_ats)b::timestamptz[])[width_bucket(email_id, %(email_ids)b::uuid[])],
        publish_due_at = null,
        dead_letter_due_at = null
    where email_id = any(%(email_ids)b)
        and email_id between %(lowest_id)s and %(highest_id)s
        and (status <> 'sent') is true
    returning email_id, tenant_id, message_key, correlation_id, attempt_worker is not null as has_attempt
),
attempted as (
    insert into dispatcher.email_attempt (
        email_id, attempt_number, worker, provider, started_at, finished_at, outcome, error
    )
    select email_id, attempt_number, %(worker)s, %(provider)s, started_at, finished_at, 'accepted', error
    from unnest(
        %(email_ids)b::uuid[],
        %(attempt_numbers)s::integer[],
        %(started_ats)b::timestamptz[],
        %(finished_ats)b::timestamptz[],
        %(errors)s::text[]
    ) as t (email_id, attempt_number, started_at, finished_at, error)
    where (select count(*) from closed where has_attempt) < cardinality(%(email_ids)b::uuid[])
        and email_id not in (select email_id from closed where has_attempt)
),
counted as (
    insert into dispatcher.email_hourly (hour, provider, outcome, slot, email_count)
    select date_trunc('hour', now(), 'UTC'), %(provider)s, 'accepted', %(slot)s, count(*)
    from closed
    having count(*) > 0
    on conflict (hour, provider, outcome, slot) do update
    set email_count = email_hourly.email_count + excluded.email_count
),
announced as (
    insert into dispatcher.outgoing_event (kind, email_id, tenant_id, message_key, correlation_id, provider)
    select 'sent', email_id, tenant_id, message_key, correlation_id, %(provider)s
    from closed
    where (select is_on from dispatcher.outgoing_feed)
)
select email_id
from unnest(%(email_ids)b::uuid[]) as t (email_id)
where (select count(*) from closed) < cardinality(%(email_ids)b::uuid[])
    and email_id not in (select email_id from closed);

-- name: record_recipients
-- Records for which recipients a provider accepted an email, and which recipients it refused for good. Execute this
-- before record, in the same transaction. It is separate, because few emails have such a result.
-- Changes an email under any lease, because the result stays true. Increases attempt_base, because a worker reads
-- recipient_outcomes only if attempt_base is greater than 0. Removes the mark of an event, because an event of a
-- recipient who has the email does not prove that the other recipients have it. No rows.
update dispatcher.email_log as e
set
    recipient_outcomes = coalesce(e.recipient_outcomes || w.outcomes::jsonb, w.outcomes::jsonb),
    attempt_base = greatest(e.attempt_base, w.attempt_number),
    proven_by = case when e.sent_at is not null then e.proven_by end
from unnest(%(email_ids)s::uuid[], %(attempt_numbers)s::integer[], %(outcomes)s::text[])
    as w (email_id, attempt_number, outcomes)
where e.email_id = any(%(email_ids)s)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and (e.email_id = w.email_id) is true;

-- name: find_attempt
-- A row: the batch with this attempt was committed although its answer was lost, because a batch commits as a whole.
-- The start time is compared, too, because attempt numbers start again after a replay.
select 1
from dispatcher.every_attempt
where email_id = %(email_id)s
    and attempt_number = %(attempt_number)s
    and started_at = %(started_at)s
    and worker = %(worker)s
limit 1;
