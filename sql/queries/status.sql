-- name: begin_snapshot
-- All statements of this transaction read one snapshot. Otherwise, an email whose result is recorded between two
-- statements would be counted twice. The transaction is read-only. No rows.
set transaction isolation level repeatable read, read only;

-- name: count_unfinished
-- Emails by status, without `sent`: the partial index contains only these emails.
select status, count(*)
from dispatcher.email_log
where status <> 'sent'
group by status;

-- name: count_monitored
-- As count_unfinished, without `cancelled`, and fast even if millions of emails wait. If more than 100,000 emails wait,
-- their number is an estimate from the last vacuum of their index.
select status, count(*)
from dispatcher.email_log
where status in ('pending', 'sending', 'failed', 'held')
group by status
union all
select
    'waiting',
    case
        when counted.emails < 100000 then counted.emails
        else greatest(
            counted.emails,
            (
                select sum(greatest(c.reltuples, 0))::bigint
                from pg_inherits as i
                join pg_class as c on c.oid = i.inhrelid
                where i.inhparent = 'dispatcher.email_log_waiting'::regclass
            )
        )
    end
from (
    select count(*) as emails
    from (
        select email_id
        from dispatcher.email_log
        where status = 'waiting'
        limit 100000
    ) as first
) as counted;

-- name: count_sent
-- The number of emails ever sent, from the hourly counts, without a scan.
select coalesce(sum(email_count), 0)::bigint
from dispatcher.email_hourly
where outcome = 'accepted';

-- part: paused
paused as (
    select scope, name
    from dispatcher.pause
    where scope <> 'provider'
        and (until_at is null or until_at > clock_timestamp())
)

-- part: is_paused
-- Whether a pause of everything, of its lane or of its tenant stops the email e. Needs paused.
exists (
    select from paused as p
    where p.scope = 'all'
        or (p.scope = 'lane' and p.name = e.lane)
        or (p.scope = 'tenant' and p.name = e.tenant_id)
)

-- name: find_oldest_pending
-- The longest time that a pending email has waited since it could first be sent, and the longest time that an email has
-- been due, both in seconds. Emails that are stopped by a pause of everything, of a lane or of a tenant do not count.
-- Null if no email is pending or due, or if the first `limit` emails are paused. The pending email with the lowest id
-- has not always waited longest: it may be a scheduled email that has just become pending. So the first emails by id
-- are compared. overview.sql explains `between`.
with {paused}
select
    (
        select extract(epoch from clock_timestamp() - min(coalesce(first.due_since, first.created_at)))::double precision
        from (
            select e.due_since, e.created_at
            from (
                select due_since, created_at, lane, tenant_id
                from dispatcher.email_log
                where status between 'pending' and 'pending'
                order by status, email_id
                limit %(limit)s
            ) as e
            where not {is_paused}
                and isfinite(coalesce(e.due_since, e.created_at))
            limit 10000
        ) as first
    ),
    (
        select extract(epoch from clock_timestamp() - e.publish_due_at)::double precision
        from (
            select publish_due_at, lane, tenant_id
            from dispatcher.email_log
            where publish_due_at is not null
                and isfinite(publish_due_at)
            order by publish_due_at
            limit %(limit)s
        ) as e
        where not {is_paused}
        limit 1
    );

-- name: count_sent_recently
-- The approximate number of emails sent in the last hour and in the last 24 hours, from counts per clock hour. If only
-- a part of a clock hour is in the wanted time, only this fraction of the hour's count is added.
select
    coalesce(sum(email_count * greatest(0, least(1, extract(epoch from hour + interval '1 hour' - (now() - interval '1 hour')) / 3600))), 0)::double precision,
    coalesce(sum(email_count * greatest(0, least(1, extract(epoch from hour + interval '1 hour' - (now() - interval '1 day')) / 3600))), 0)::double precision
from dispatcher.email_hourly
where outcome = 'accepted'
    and hour > now() - interval '26 hours';

-- name: list_workers
-- Workers with sessions or leases: name, seconds since the session began (null: the worker has no session), number of
-- emails under the worker's leases, and seconds until the last of these leases expires (null: it has no leases).
-- PostgreSQL shows the sessions of other roles without their start time; such a worker counts as started now.
with present as (
    select application_name as worker, coalesce(min(backend_start), clock_timestamp()) as began_at
    from pg_stat_activity
    where datname = current_database()
        and application_name ~ ':w[0-9]+:[0-9]+:[0-9a-f]+$'
        and has_table_privilege(usesysid, 'dispatcher.email_log', 'update')
    group by application_name
),
leasing as (
    select
        locked_by as worker, count(*) as emails,
        max(locked_until) filter (where isfinite(locked_until)) as last_lease_until
    from dispatcher.email_log
    where status = 'sending'
    group by locked_by
)
select
    worker,
    extract(epoch from clock_timestamp() - present.began_at)::double precision,
    coalesce(leasing.emails, 0),
    extract(epoch from leasing.last_lease_until - clock_timestamp())::double precision
from present
full join leasing using (worker)
order by worker;

-- name: measure_latency
-- The latency of the newest sent emails: their number, and the 50th, 95th and 99th percentile in seconds. The latency
-- is the time from when an email could first be sent until a provider accepted it. Zero rows: no email was sent.
select
    count(*) as emails,
    percentile_cont(0.5) within group (order by extract(epoch from sent_at - created_at)) as p50_seconds,
    percentile_cont(0.95) within group (order by extract(epoch from sent_at - created_at)) as p95_seconds,
    percentile_cont(0.99) within group (order by extract(epoch from sent_at - created_at)) as p99_seconds
from (
    select sent_at, coalesce(due_since, created_at) as created_at
    from dispatcher.email_log
    where status = 'sent'
        and isfinite(sent_at)
        and isfinite(coalesce(due_since, created_at))
        and email_id > dispatcher.email_id_lowest_at(statement_timestamp() - interval '10 minutes')
    order by email_id desc
    limit 1000
) as newest
having count(*) > 0;
