-- name: lease
-- Takes the emails that may be leased and returns each with its content; those that are missing see find_standing.
-- Being delivered proves that an email was published, so its due mark goes in the same write.
-- lowest_id and highest_id prune partitions, here and below, where a list of ids alone does not; ids are sorted, so that
-- batches lock in one order.
-- Its plan is kept, and so are those of all statements of a worker (see keep_plans), so that none may depend on what the
-- tables held when it was made. One that began with the range of ids would read all that lies between the oldest email of
-- a batch and the newest, for each of them. Hence emails are looked up by `= any`, here and below, and what else has to hold
-- stands where neither a join nor another index can begin with it: in `… is true`.
-- A statement that locks or changes rows of a partitioned table finds them by `= any`, never laterally, by a join or by
-- `= (select …)`. Those select partitions while the statement runs, and PostgreSQL 18 up to 18.5 then reads freed memory and
-- crashes once another transaction has changed such a row meanwhile. test_plans.py checks every statement.
-- Content of more than most_octets, or with attachments, comes as its size alone: a worker reads it when it is about to
-- send it (see content.sql). The size is 0 where the content is here, and negative where it is unknown. The size of a value
-- that is stored out of line is read from its pointer.
with leased as (
    update dispatcher.email_log as e
    set
        status = 'sending',
        lease_token = e.lease_token + 1,
        attempt_count = e.attempt_count + 1,
        locked_by = %(worker)s,
        locked_until = clock_timestamp() + %(lease_seconds)s * interval '1 second',
        published_at = coalesce(e.published_at, clock_timestamp()),
        publish_due_at = null
    where e.email_id = any(%(email_ids)b)
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and (
            (e.email_id, e.message_key, e.status) in (
                select w.email_id, w.message_key, 'pending'
                from unnest(%(email_ids)b::uuid[], %(message_keys)s::text[]) as w (email_id, message_key)
            )
        ) is true
        and e.locked_until < now()
    returning
        e.email_id, e.lease_token, e.attempt_count, e.on_uncertain, e.correlation_id, e.attempt_base, e.traceparent,
        e.created_at
)
select
    e.email_id, e.lease_token, e.attempt_count, e.on_uncertain, e.correlation_id, e.attempt_base,
    e.traceparent, e.created_at,
    c.sender, c.recipients, c.subject,
    case when c.octets_apart = 0 then c.text_body end,
    case when c.octets_apart = 0 then c.html_body end,
    c.template_id,
    case when c.octets_apart = 0 then c.template_data end,
    c.headers, c.tags, c.octets_apart
from leased as e
left join lateral (
    select
        sender, recipients, subject, text_body, html_body, template_id, template_data, headers, tags,
        case
            when attachment_count = 0 and octets <= %(most_octets)s then 0
            when octets is not null then greatest(octets, 1)
            when attachment_count > 0 then -1
            when coalesce(octet_length(text_body), 0) + coalesce(octet_length(html_body), 0) <= %(most_octets)s then 0
            else coalesce(octet_length(text_body), 0) + coalesce(octet_length(html_body), 0)
        end as octets_apart
    from dispatcher.email_content
    where email_id = e.email_id
        and email_id between %(lowest_id)s and %(highest_id)s
    offset 0
) as c on true;

-- name: lease_unread
-- As lease, for one email that PostgreSQL could not lease with its content. Reads as little of it as possible.
update dispatcher.email_log as e
set
    status = 'sending',
    lease_token = e.lease_token + 1,
    attempt_count = e.attempt_count + 1,
    locked_by = %(worker)s,
    locked_until = clock_timestamp() + %(lease_seconds)s * interval '1 second',
    published_at = coalesce(e.published_at, clock_timestamp()),
    publish_due_at = null
where e.email_id = %(email_id)s
    and e.message_key = %(message_key)s
    and e.status = 'pending'
    and e.locked_until < now()
returning e.lease_token, e.attempt_count, e.on_uncertain, e.attempt_base;

-- name: find_standing
-- The status of emails that could not be leased, with the token of our lease, or of the lease that a rescue took from us if
-- the email has not changed since, nor was discarded; null if neither. An id that is missing has no row.
select
    email_id, message_key, status,
    case
        when status = 'sending' and locked_by = %(worker)s then lease_token
        when status = 'held'
            and rescued_from = %(worker)s
            and lease_token = rescued_token + 1
            and dead_letter_discarded_at is null
            then rescued_token
    end
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s;

-- name: renew
-- Gives leases that are still ours more time, never less: a deferral that was recorded since we looked may have prolonged
-- one over the wait before its retry. One that has run out as well, as long as nobody has judged it. An id that is missing
-- was lost.
-- Always another end than before, if by a microsecond: whoever saw the lease run out judges it by the end that it had then,
-- and must not be misled by a clock that was set back.
update dispatcher.email_log as e
set locked_until = greatest(
    e.locked_until + interval '1 microsecond',
    clock_timestamp() + %(lease_seconds)s * interval '1 second'
)
where e.email_id = any(%(email_ids)s)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and (
        (e.email_id, e.lease_token, e.status) in (
            select w.email_id, w.lease_token, 'sending'
            from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[]) as w (email_id, lease_token)
        )
    ) is true
returning e.email_id;

-- name: release
-- Gives back leases under which no attempt was made: pending and due again, the attempt unburnt. Due after away_seconds,
-- where the provider that the email needs is away while others work, or where no memory is free for it.
-- An id that is missing was lost.
update dispatcher.email_log as e
set
    status = 'pending',
    attempt_count = e.attempt_count - 1,
    locked_by = null,
    locked_until = 'epoch',
    publish_due_at = clock_timestamp() + w.away_seconds * interval '1 second'
from unnest(%(email_ids)s::uuid[], %(lease_tokens)s::bigint[], %(away_seconds)s::double precision[])
    as w (email_id, lease_token, away_seconds)
where e.email_id = any(%(email_ids)s)
    and e.email_id between %(lowest_id)s and %(highest_id)s
    and e.email_id = w.email_id
    and (e.lease_token = w.lease_token and e.status = 'sending') is true
returning e.email_id;

-- name: replay_letters
-- Somebody has put dead letters back on the send queue: that is a person's replay, as long as the letter tells of how its
-- email stands (see ops/letters.py), the email cannot have arrived, and its letter did not come back so often that a
-- machine must be moving it. Returns a verdict per email: replayed; refused, for a command to decide; or stale. One that is
-- missing is held by somebody else's transaction.
with free as (
    select email_id, status, attempt_count, was_uncertain
    from dispatcher.email_log
    where email_id = any(%(email_ids)s)
        and email_id between %(lowest_id)s and %(highest_id)s
    for update skip locked
),
standing as (
    select
        e.email_id,
        (e.email_id, e.attempt_count) in (
            select w.email_id, w.attempts
            from unnest(%(email_ids)s::uuid[], %(attempts)s::integer[]) as w (email_id, attempts)
        )
        and e.status in ('failed', 'held') as is_told,
        e.status = 'held' or e.was_uncertain as may_have_arrived,
        e.email_id in (
            select c.email_id
            from dispatcher.email_content as c
            where c.email_id = any(%(email_ids)s)
                and c.email_id between %(lowest_id)s and %(highest_id)s
        ) as has_content,
        (
            select count(*)
            from dispatcher.operator_audit as a
            where a.email_id = e.email_id
                and a.action = 'replay_letter'
        ) as times
    from free as e
),
judged as (
    select
        email_id,
        case
            when not is_told then 'stale'
            when may_have_arrived or not has_content or times >= %(most_times)s then 'refused'
            else 'replayed'
        end as verdict
    from standing
),
replayed as (
    update dispatcher.email_log as e
    set
        status = 'pending',
        attempt_base = e.attempt_count,
        crash_count = 0,
        locked_by = null,
        locked_until = 'epoch',
        published_at = null,
        publish_due_at = clock_timestamp(),
        dead_letter_due_at = null,
        dead_letter_discarded_at = null
    where e.email_id = any(array(select email_id from judged where verdict = 'replayed'))
        and e.email_id between %(lowest_id)s and %(highest_id)s
    returning e.email_id, e.attempt_count
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select
        %(worker)s, 'replay_letter', 'Its dead letter was put back on the send queue.', email_id,
        jsonb_build_object('attempts', attempt_count)
    from replayed
)
select email_id, verdict, pg_notify('email_dispatcher_due', '')
from judged;
