-- name: report_presence
-- Records that this monitor's host is running, and which processes run on it (null: keeps the last report). Deletes
-- hosts that have not reported for a day.
with forgotten as (
    delete from dispatcher.host_presence
    where seen_at < clock_timestamp() - interval '1 day'
        and holder <> %(holder)s
)
insert into dispatcher.host_presence as p (holder, host, seen_at, version, processes, recipients)
values (%(holder)s, %(host)s, clock_timestamp(), %(version)s, %(processes)s::jsonb, %(recipients)s)
on conflict (holder) do update
set
    host = excluded.host,
    seen_at = excluded.seen_at,
    version = coalesce(excluded.version, p.version),
    processes = coalesce(excluded.processes, p.processes),
    recipients = coalesce(excluded.recipients, p.recipients)
returning p.holder;

-- name: leave_presence
-- Records an orderly stop of this monitor, so that its host does not count as vanished. No row: this monitor has never
-- reported.
delete from dispatcher.host_presence
where holder = %(holder)s
returning holder;

-- name: list_announced_alerts
-- The active alerts of a DLQ by channel, each with the seconds since the channel last sent a notice about the alert.
select kind, channel, raised_at, extract(epoch from clock_timestamp() - told_at)::double precision
from dispatcher.alert_told
where queue = %(queue)s;

-- name: save_announced_alert
-- Records that a channel sent a notice about an active alert, age_seconds ago. If another monitor has recorded a
-- notice, keeps the later time.
insert into dispatcher.alert_told as t (queue, kind, channel, raised_at, told_at)
values (
    %(queue)s, %(kind)s, %(channel)s, %(raised_at)s,
    clock_timestamp() - %(age_seconds)s::double precision * interval '1 second'
)
on conflict (queue, kind, channel) do update
set told_at = greatest(t.told_at, excluded.told_at)
returning queue;

-- name: delete_announced_alert
-- Records that a channel sent the notice that an alert is resolved. No row: the alert was not recorded as active.
delete from dispatcher.alert_told
where queue = %(queue)s
    and kind = %(kind)s
    and channel = %(channel)s
returning queue;

-- name: find_oldest_dead_letters
-- The oldest failed and held emails that have a dead letter which no operator discarded: correlation id, and age in
-- seconds.
select
    e.correlation_id,
    extract(epoch from clock_timestamp() - coalesce(e.dead_letter_due_at, a.finished_at, e.created_at))::double precision
from (
    select email_id, correlation_id, created_at, dead_letter_due_at
    from (values ('failed'), ('held')) as of_status (status)
    cross join lateral (
        select e.*
        from dispatcher.email_log as e
        where e.status in ('failed', 'held')
            and e.status = of_status.status
            and {has_letter}
            and e.dead_letter_discarded_at is null
            and isfinite(coalesce(e.dead_letter_due_at, e.created_at))
        order by e.email_id
        limit %(limit)s
    ) as oldest
    order by email_id
    limit %(limit)s
) as e
left join lateral (
    select max(finished_at) as finished_at
    from dispatcher.email_attempt
    where email_id = e.email_id
) as a on true
order by 2 desc;

-- name: save_alert_check
-- Records what a check of a DLQ found, for the operators' page. Returns the queue.
insert into dispatcher.alert_check (queue, host, checked_at, depth, fault, alerts)
values (%(queue)s, %(host)s, clock_timestamp(), %(depth)s::bigint, %(fault)s::text, %(alerts)s::jsonb)
on conflict (queue) do update
set (host, checked_at, depth, fault, alerts) = (
    excluded.host, excluded.checked_at, excluded.depth, excluded.fault, excluded.alerts
)
returning queue;

-- name: list_shared_host_names
-- The names that several connected monitors have as their host's name. After a host lost its network, PostgreSQL may
-- count its former session, too, until that session has been idle for too long. The sessions of roles that cannot report
-- for a host do not count.
select substring(application_name from '^dispatcher alerts (.+)$') as host
from pg_stat_activity
where datname = current_database()
    and starts_with(application_name, 'dispatcher alerts ')
    and has_table_privilege(usesysid, 'dispatcher.host_presence', 'insert')
group by 1
having count(*) > 1
order by 1;

-- name: find_flow
-- Shows whether emails are being sent: the last hour with an accepted email, or the number of emails accepted in it,
-- changes with each accepted email. Also returns the number of emails that are due or in their first lease and not
-- paused, up to a limit, and the id of one of them.
with {paused}
select
    accepted.hour, accepted.emails, waiting.emails, waiting.email_id
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
        from dispatcher.email_log as e
        where status in ('pending', 'sending')
            and not {is_paused}
        limit %(limit)s
    ) as unfinished
    where case status
        when 'pending' then coalesce(publish_due_at <= clock_timestamp(), true)
        else error_type is null  -- an email with an error was deferred, and a worker retries it
    end
) as waiting;

-- name: find_longest_due_dead_letter
-- How many seconds the oldest due dead letter has been waiting to be published; null if none is due. Here and in the
-- other statements about all emails, `isfinite` leaves out damaged rows: before PostgreSQL 17, to subtract an infinite
-- instant raises an error.
select extract(epoch from clock_timestamp() - min(dead_letter_due_at))::double precision
from dispatcher.email_log
where dead_letter_due_at is not null
    and isfinite(dead_letter_due_at);

-- name: find_impossible_events
-- The impossible events of the last day (see events.sql), at most `limit`: their number by provider, and one of their
-- emails.
select provider, count(*), min(email_id::text)
from (
    select provider, email_id
    from dispatcher.email_event
    where doubt = 'impossible'
        and received_at > clock_timestamp() - interval '1 day'
    limit %(limit)s
) as impossible
group by provider
order by provider;
