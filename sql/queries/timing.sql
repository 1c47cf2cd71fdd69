-- name: find_next_due
-- The seconds until the relay has something to do: until the first email or dead letter must be published, until the
-- first waiting email must be woken, or until the first email expires. 0 or less: there is something to do now, or an
-- event has proven that an email was sent (see find_proven). Null: nothing is due, and nothing becomes due unless rows
-- are written. Also returns the state that note_timeline compares, and what find_controls_version returns. Each part
-- reads one entry of an index. Before PostgreSQL 17, the difference of two instants would raise an error if one of them
-- is infinite. A mark more than ahead_seconds ahead of the clock is due, as in find_publish_due.
select
    (least(
        (select extract(epoch from min(publish_due_at)) from dispatcher.email_log where publish_due_at is not null),
        (select extract(epoch from min(dead_letter_due_at)) from dispatcher.email_log where dead_letter_due_at is not null),
        (select extract(epoch from min(wait_until)) from dispatcher.email_log where status = 'waiting'),
        (
            select extract(epoch from min(expires_at))
            from dispatcher.email_log
            where status in ('pending', 'waiting', 'held')
                and expires_at is not null
        ),
        (
            select 0
            where exists (
                select from dispatcher.email_log
                where proven_by is not null
                    and status <> 'sent'
                    and status <> 'sending'
            )
                or exists (
                    select from dispatcher.email_log
                    where publish_due_at >= now() + %(ahead_seconds)s * interval '1 second'
                )
                or exists (
                    select from dispatcher.email_log
                    where dead_letter_due_at >= now() + %(ahead_seconds)s * interval '1 second'
                )
        )
    ) - extract(epoch from clock_timestamp()))::double precision,
    concat(pg_current_snapshot(), ' ', current_setting('synchronous_standby_names')),
{controls_version}
;

-- name: find_next_wake
-- Negative: overdue. Null: no email waits. Before PostgreSQL 17, to subtract an infinite instant raises an error.
select (extract(epoch from min(wait_until)) - extract(epoch from clock_timestamp()))::double precision
from dispatcher.email_log
where status = 'waiting';

-- name: find_wakeable
-- Waiting emails whose time has come, longest overdue first. Leaves out emails that another transaction has locked (for
-- example to cancel thousands of emails), so that these emails cannot delay others.
select email_id
from dispatcher.email_log
where status = 'waiting'
    and wait_until <= now()
order by wait_until
limit %(limit)s
for no key update skip locked;

-- name: wake
-- Each email is due at a different instant, because the relay continues its scans from an instant.
update dispatcher.email_log
set
    status = 'pending',
    wait_until = null,
    published_at = null,
    publish_due_at = clock_timestamp()
where {is_given}
    and (status = 'waiting' and wait_until <= now()) is true
returning email_id;

-- name: find_expired
-- Longest expired first. Leaves out emails that an event proves to be sent (see events.sql), and locked emails.
select email_id
from dispatcher.email_log
where status in ('pending', 'waiting', 'held')
    and expires_at <= now()
    and proven_by is null
order by expires_at
limit %(limit)s
for no key update skip locked;

-- name: cancel_expired
-- A held email may have been sent, but from now on, no operator needs to decide about it. So its dead letter is stale,
-- and the change is audited. last_error says that the outcome is unknown if the email was held, or if an earlier
-- attempt was uncertain and the email then became pending, by policy or because it is pinned. Returns the previous
-- statuses.
with free as (
    select email_id, status
    from dispatcher.email_log
    where {is_given}
        and (status in ('pending', 'waiting', 'held') and expires_at <= now() and proven_by is null) is true
    order by email_id
    for no key update skip locked
),
changed as (
    update dispatcher.email_log as e
    set
        status = 'cancelled',
        wait_until = null,
        locked_by = null,
        locked_until = 'epoch',
        rescued_token = null,
        settled_at = clock_timestamp(),
        error_type = case when e.recipient_outcomes is null then 'expired' else 'partly_delivered' end,
        last_error = case
            when f.status = 'held' or e.was_uncertain
                then 'The email expired. It is unknown whether an earlier attempt was accepted.'
            when e.recipient_outcomes is not null
                then 'The email expired after it was delivered to some of its recipients.'
            else 'The email expired before it was sent.'
        end,
        publish_due_at = null,
        dead_letter_due_at = null
    from free as f
    where e.email_id = any(array(select email_id from free))
        and e.email_id between %(lowest_id)s and %(highest_id)s
        and e.email_id = f.email_id
    returning
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, 'cancelled' as kind, e.error_type as reason,
        e.provider, e.attempt_count, f.status as previous_status
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, email_id, detail)
    select
        'expiry', 'cancel', 'The email expired while it was held, so no operator needs to decide.', email_id,
        jsonb_build_object('attempts', attempt_count)
    from changed
    where previous_status = 'held'
),
{announced}
select email_id, correlation_id, previous_status
from changed;

-- name: find_controls_version
-- A value that is different after each change of pauses, lane policies, tenants' limits or domains' ceilings, and after a
-- pause has ended. Most of the time nothing has changed, so a process need not read the tables. xmin is the transaction
-- that wrote the row: each write of a row increases the sum, and a deletion changes the count. Nothing is written for
-- this, so an operator's open transaction delays no other.
select
{controls_version}
;

-- part: controls_version
array[
    (
        select concat(count(*), ' ', sum(xmin::text::bigint))
        from dispatcher.pause
        where until_at is null or until_at > clock_timestamp()
    ),
    (select concat(count(*), ' ', sum(xmin::text::bigint)) from dispatcher.lane_policy),
    (select concat(count(*), ' ', sum(xmin::text::bigint)) from dispatcher.tenant_limit),
    (select concat(count(*), ' ', sum(xmin::text::bigint)) from dispatcher.domain_limit)
]::text
