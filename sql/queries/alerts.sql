-- name: hold_alert_watch
-- Takes the watch over a DLQ, or keeps it, for so long. No row: another monitor has it.
insert into dispatcher.alert_watch as w (queue, holder, held_until)
values (%(queue)s, %(holder)s, clock_timestamp() + %(seconds)s::double precision * interval '1 second')
on conflict (queue) do update
set
    holder = excluded.holder,
    held_until = excluded.held_until
where w.holder = excluded.holder
    or w.held_until < clock_timestamp()
returning holder;

-- name: release_alert_watch
-- Gives the watch back, so that another monitor need not wait for its end. A row if it was ours.
delete from dispatcher.alert_watch
where queue = %(queue)s
    and holder = %(holder)s
returning queue;

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

-- name: find_longest_due_dead_letter
-- How many seconds the dead letter has waited that waits longest for its place on the DLQ; null if none waits.
select extract(epoch from clock_timestamp() - min(dead_letter_due_at))::double precision
from dispatcher.email_log
where dead_letter_due_at is not null;
