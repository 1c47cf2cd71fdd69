-- name: report_presence
-- Records that this monitor's host runs, and forgets hosts that have been silent for a day.
with forgotten as (
    delete from dispatcher.host_presence
    where seen_at < clock_timestamp() - interval '1 day'
        and holder <> %(holder)s
)
insert into dispatcher.host_presence (holder, host, seen_at)
values (%(holder)s, %(host)s, clock_timestamp())
on conflict (holder) do update
set
    host = excluded.host,
    seen_at = excluded.seen_at
returning holder;

-- name: leave_presence
-- Records that this monitor stops in order.
delete from dispatcher.host_presence
where holder = %(holder)s
returning holder;

-- name: list_alerts_told
-- The alerts of a DLQ that stand, by channel, with the seconds since they were last told.
select kind, channel, raised_at, extract(epoch from clock_timestamp() - told_at)::double precision
from dispatcher.alert_told
where queue = %(queue)s;

-- name: enter_alert_told
-- A channel has told that an alert stands, so many seconds ago. Never makes it older than another monitor knows.
insert into dispatcher.alert_told as t (queue, kind, channel, raised_at, told_at)
values (
    %(queue)s, %(kind)s, %(channel)s, %(raised_at)s,
    clock_timestamp() - %(age_seconds)s::double precision * interval '1 second'
)
on conflict (queue, kind, channel) do update
set told_at = greatest(t.told_at, excluded.told_at)
returning queue;

-- name: enter_alert_over
-- A channel has told an alert's end. A row if it stood.
delete from dispatcher.alert_told
where queue = %(queue)s
    and kind = %(kind)s
    and channel = %(channel)s
returning queue;

-- name: find_oldest_dead_letters
-- The oldest emails that failed or are held, but for those whose dead letter a person discarded: correlation id, and
-- seconds since the last attempt ended, or since the email was enqueued where none did.
select
    e.correlation_id,
    extract(epoch from clock_timestamp() - coalesce(e.dead_letter_due_at, a.finished_at, e.created_at))::double precision
from (
    (
        select email_id, correlation_id, created_at, dead_letter_due_at
        from dispatcher.email_log
        where status = 'failed'
            and dead_letter_discarded_at is null
        order by email_id
        limit %(limit)s
    )
    union all
    (
        select email_id, correlation_id, created_at, dead_letter_due_at
        from dispatcher.email_log
        where status = 'held'
            and dead_letter_discarded_at is null
        order by email_id
        limit %(limit)s
    )
    order by email_id
    limit %(limit)s
) as e
left join lateral (
    select max(finished_at) as finished_at
    from dispatcher.email_attempt
    where email_id = e.email_id
) as a on true
order by 2 desc;

-- name: list_presences
-- The hosts whose monitors did not stop in order, when each last reported, and how many seconds ago that is.
select host, max(seen_at), extract(epoch from clock_timestamp() - max(seen_at))::double precision
from dispatcher.host_presence
group by host;

-- name: find_flow
-- Whether emails are sent: the last hour in which one was accepted and how many were in that hour, which changes with each
-- accepted email; how many are due, or under lease for the first time, up to a bound; and one of these.
select
    accepted.hour,
    accepted.emails,
    waiting.emails,
    waiting.email_id
from (
    select max(hour) as hour, sum(email_count) as emails
    from dispatcher.email_hourly
    where outcome = 'accepted'
        and hour = (select max(hour) from dispatcher.email_hourly where outcome = 'accepted')
) as accepted
cross join (
    select count(*) as emails, min(email_id::text)::uuid as email_id
    from (
        select email_id, status, error_type, publish_due_at
        from dispatcher.email_log
        where status in ('pending', 'sending')
        limit %(limit)s
    ) as unfinished
    where case status
        when 'pending' then coalesce(publish_due_at <= clock_timestamp(), true)
        else error_type is null  -- else its recipients deferred it, and a worker tries it again
    end
) as waiting;

-- name: find_longest_due_dead_letter
-- How many seconds the dead letter has waited that waits longest for its place on the DLQ; null if none waits.
select extract(epoch from clock_timestamp() - min(dead_letter_due_at))::double precision
from dispatcher.email_log
where dead_letter_due_at is not null;
