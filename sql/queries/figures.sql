-- What `dispatcher status`, the Overview and the monitor's gauges show.
--
-- The Overview executes its statements every few seconds, so each of them reads a bounded number of rows, however many
-- emails there are. Because of `between` and the order by status, PostgreSQL can use only the index that begins with the
-- status. With `status = …`, PostgreSQL may read the whole primary key, if its statistics say that most emails have this
-- status.

-- name: begin_snapshot
-- All statements of this transaction read one snapshot. Otherwise, an email whose result is recorded between two
-- statements would be counted twice. The transaction is read-only. No rows.
set transaction isolation level repeatable read, read only;

-- name: limit_overview
-- Limits how long each statement of this transaction may take. A plan for any tenant would read the emails of all.
select
    set_config('statement_timeout', %(milliseconds)s::text, true),
    set_config('plan_cache_mode', 'force_custom_plan', true);

-- name: count_emails
-- The number of emails of each status. A partial index contains all emails that are not sent; the hourly counts have the
-- number of emails ever sent, without a scan.
with counted as (
    select status, count(*) as emails
    from dispatcher.email_log
    where status <> 'sent'
    group by status
    union all
    select 'sent', sum(email_count)::bigint
    from dispatcher.email_hourly
    where outcome = 'accepted'
)
select status, coalesce(emails, 0)
from unnest(array['pending', 'waiting', 'sending', 'sent', 'failed', 'held', 'cancelled'])
    with ordinality as known (status, place)
left join counted using (status)
order by place;

-- name: count_kept_back
-- The failed emails that were kept back (DISPATCHER_ALLOW_RECIPIENTS).
select count(*)
from dispatcher.email_log
where status = 'failed'
    and error_type = 'kept_back';

-- name: count_monitored
-- As count_emails, without `sent` and `cancelled`, and fast even if millions of emails wait. If more than 100,000 emails
-- wait, their number is an estimate from the last vacuum of their index.
with counted as (
    select status, count(*) as emails
    from dispatcher.email_log
    where status in ('pending', 'sending', 'failed', 'held')
    group by status
    union all
    select
        'waiting',
        case
            when count(*) < 100000 then count(*)
            else greatest(
                count(*),
                (
                    select sum(greatest(c.reltuples, 0))::bigint
                    from pg_inherits as i
                    join pg_class as c on c.oid = i.inhrelid
                    where i.inhparent = 'dispatcher.email_log_waiting'::regclass
                )
            )
        end
    from (
        select email_id
        from dispatcher.email_log
        where status = 'waiting'
        limit 100000
    ) as first
)
select status, coalesce(emails, 0)
from unnest(array['pending', 'waiting', 'sending', 'failed', 'held']) with ordinality as known (status, place)
left join counted using (status)
order by place;

-- name: count_for_overview
-- The number of emails by state, of one tenant or of all (tenant_id is null), each counted up to a limit, and whether the
-- counting stopped there. The limit is `undecided` for dead letters and held emails that no operator has decided, and
-- `limit` for all other states. Of these, no index finds a tenant's emails, so only the first `limit` emails of all
-- tenants are examined. The emails that were kept back are counted among the newest `limit` failed emails.
select name, emails, is_cut
from (values ('dead_letters', 'failed'), ('held', 'held')) as of_status (name, status)
cross join lateral (
    select count(*) as emails, count(*) >= %(undecided)s as is_cut
    from (
        select from dispatcher.email_log as e
        where e.status in ('failed', 'held')
            and e.status between of_status.status and of_status.status
            and (%(tenant_id)s::text is null or e.tenant_id = %(tenant_id)s)
            and e.dead_letter_discarded_at is null
            and {has_letter}
        order by e.status, e.tenant_id
        limit %(undecided)s
    ) as first
) as counted
union all
select
    'kept_back',
    count(*) filter (
        where error_type = 'kept_back'
            and (%(tenant_id)s::text is null or tenant_id = %(tenant_id)s)
    ),
    count(*) >= %(limit)s
from (
    select e.tenant_id, e.error_type
    from dispatcher.email_log as e
    where e.status <> 'sent'
        and e.status between 'failed' and 'failed'
    order by e.status desc, e.email_id desc
    limit %(limit)s
) as newest
union all
select name, emails, is_cut
from (values ('pending'), ('sending'), ('waiting'), ('cancelled')) as of_status (name)
cross join lateral (
    select
        count(*) filter (where %(tenant_id)s::text is null or tenant_id = %(tenant_id)s) as emails,
        count(*) >= %(limit)s as is_cut
    from (
        select e.tenant_id
        from dispatcher.email_log as e
        where e.status <> 'sent'
            and e.status between of_status.name and of_status.name
        order by e.status, e.email_id
        limit %(limit)s
    ) as first
) as counted;

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

-- name: count_paused
-- How many of the first `limit` pending emails are paused, and whether the counting stopped at this limit.
with {paused}
select count(*) filter (where {is_paused}) as emails, count(*) >= %(limit)s as is_cut
from (
    select lane, tenant_id
    from dispatcher.email_log
    where status between 'pending' and 'pending'
    order by status, email_id
    limit %(limit)s
) as e;

-- name: find_oldest_pending
-- The longest time that a pending email has waited since it could first be sent, and the longest time that an email has
-- been due, both in seconds. Paused emails do not count. Null if there is none, or if the first `limit` emails are paused.
-- The pending email with the lowest id may be a scheduled email that has just become pending, so many are compared.
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

-- part: newest_sent
-- The emails that were sent in the last ten minutes, at most 1,000. Reads only the newest `limit` emails, and the newest
-- `limit` emails that were enqueued before the oldest pending email: during a backlog, the newest emails are not sent yet.
-- Leaves out held emails that an operator or an event settled: the time of that is not the time of an attempt.
select *
from (
    (
        select {of_sent}
        from dispatcher.email_log
        order by email_id desc
        limit %(limit)s
    )
    union
    (
        select {of_sent}
        from dispatcher.email_log
        where email_id < (
            select email_id
            from dispatcher.email_log
            where status between 'pending' and 'pending'
            order by status, email_id
            limit 1
        )
        order by email_id desc
        limit %(limit)s
    )
) as read
where status = 'sent'
    and sent_at > statement_timestamp() - interval '10 minutes'
    and isfinite(sent_at)
    and isfinite(since)
    and (settled_at is null or settled_at < leased_at)
order by sent_at desc
limit 1000

-- part: of_sent
email_id, sent_at, coalesce(due_since, created_at) as since, status, provider, settled_at, leased_at, attempt_worker,
attempt_started_at, attempt_finished_at

-- name: measure_latency
-- The latency of the newest sent emails (newest_sent): their number, and the 50th, 95th and 99th percentile in seconds.
-- The latency is the time from when an email could first be sent until a provider accepted it. Zero rows: no email was
-- sent.
select
    count(*) as emails,
    percentile_cont(0.5) within group (order by extract(epoch from sent_at - since)) as p50_seconds,
    percentile_cont(0.95) within group (order by extract(epoch from sent_at - since)) as p95_seconds,
    percentile_cont(0.99) within group (order by extract(epoch from sent_at - since)) as p99_seconds
from ({newest_sent}) as newest
having count(*) > 0;

-- name: measure_paces
-- The newest sent emails (newest_sent) by their host, and by their provider: the host or the provider (the other is
-- null), their number, how many of them were sent per minute since the oldest of them, and the 50th and 99th percentile
-- of how long the attempt took, in seconds.
with attempt as (
    select
        split_part(coalesce(n.attempt_worker, a.worker), ':', 1) as host, n.provider, n.sent_at,
        extract(
            epoch from coalesce(n.attempt_finished_at, a.finished_at) - coalesce(n.attempt_started_at, a.started_at)
        )::double precision as seconds
    from ({newest_sent}) as n
    left join lateral (
        select worker, started_at, finished_at
        from dispatcher.email_attempt
        where n.attempt_worker is null
            and email_id = n.email_id
            and outcome = 'accepted'
        order by attempt_number desc
        limit 1
    ) as a on true
    where coalesce(n.attempt_worker, a.worker) is not null
        and isfinite(coalesce(n.attempt_started_at, a.started_at))
        and isfinite(coalesce(n.attempt_finished_at, a.finished_at))
)
select
    host,
    provider,
    count(*) as emails,
    (count(*) * 60.0 / greatest(extract(epoch from statement_timestamp() - min(min(sent_at)) over ()), 60))::double precision
        as per_minute,
    percentile_cont(0.5) within group (order by seconds) as p50_seconds,
    percentile_cont(0.99) within group (order by seconds) as p99_seconds
from attempt
group by grouping sets ((host), (provider))
order by host, provider;

-- name: sum_attempts
-- Attempts by hour or day (`unit`, in UTC), provider and outcome, for the last `seconds`, oldest first. The first
-- hour or day is counted whole.
select date_trunc(%(unit)s, hour, 'UTC') as begins_at, provider, outcome, sum(email_count)::bigint
from dispatcher.email_hourly
where hour >= date_trunc(%(unit)s, statement_timestamp() - %(seconds)s::double precision * interval '1 second', 'UTC')
group by begins_at, provider, outcome
order by begins_at, provider, outcome;

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

-- name: list_host_reports
-- The monitors that did not stop in an orderly way, the newest report of a host first.
select host, seen_at, extract(epoch from clock_timestamp() - seen_at)::double precision, version, processes
from dispatcher.host_presence
order by host, seen_at desc;

-- name: find_alert_check
-- The last check of a DLQ, with the seconds since then. No row: no monitor has checked the DLQ.
select host, extract(epoch from clock_timestamp() - checked_at)::double precision, depth, fault, alerts
from dispatcher.alert_check
where queue = %(queue)s;
