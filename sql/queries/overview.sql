-- Each statement reads a bounded number of rows, however many emails there are, because the operators' page executes
-- the statements every few seconds.
-- Because of `between` and the order by status, PostgreSQL can use only the index that begins with the status. With
-- `status = …`, PostgreSQL may read the whole primary key, if its statistics say that most emails have this status.

-- name: limit_overview
-- Limits how long each statement of this transaction may take.
select set_config('statement_timeout', %(milliseconds)s::text, true);

-- name: count_for_overview
-- The number of emails by state, each counted up to a limit. The limit is `undecided` for dead letters and held emails
-- that no operator has decided, and `limit` for all other states.
select 'dead_letters', count(*)
from (
    select from dispatcher.email_log
    where status in ('failed', 'held')
        and status between 'failed' and 'failed'
        and dead_letter_discarded_at is null
        and error_type is distinct from 'suppressed'
    order by status, tenant_id
    limit %(undecided)s
) as counted
union all
select 'held', count(*)
from (
    select from dispatcher.email_log
    where status in ('failed', 'held')
        and status between 'held' and 'held'
        and dead_letter_discarded_at is null
        and error_type is distinct from 'suppressed'
    order by status, tenant_id
    limit %(undecided)s
) as counted
union all
select 'pending', count(*)
from (
    select from dispatcher.email_log
    where status between 'pending' and 'pending'
    order by status, email_id
    limit %(limit)s
) as counted
union all
select 'sending', count(*)
from (
    select from dispatcher.email_log
    where status between 'sending' and 'sending'
    order by status, email_id
    limit %(limit)s
) as counted
union all
select 'waiting', count(*)
from (
    select from dispatcher.email_log
    where status between 'waiting' and 'waiting'
    order by status, email_id
    limit %(limit)s
) as counted
union all
select 'cancelled', count(*)
from (
    select from dispatcher.email_log
    where status between 'cancelled' and 'cancelled'
    order by status, email_id
    limit %(limit)s
) as counted;

-- name: count_for_overview_of_tenant
-- As count_for_overview, for one tenant. An index finds a tenant's dead letters and held emails. For all other states,
-- there is no such index, so only the first `limit` emails of all tenants with this status are examined. The last
-- column is the number of emails that were read.
select 'dead_letters', count(*), count(*)
from (
    select from dispatcher.email_log
    where status in ('failed', 'held')
        and status between 'failed' and 'failed'
        and tenant_id = %(tenant_id)s
        and dead_letter_discarded_at is null
        and error_type is distinct from 'suppressed'
    order by status, tenant_id
    limit %(undecided)s
) as counted
union all
select 'held', count(*), count(*)
from (
    select from dispatcher.email_log
    where status in ('failed', 'held')
        and status between 'held' and 'held'
        and tenant_id = %(tenant_id)s
        and dead_letter_discarded_at is null
        and error_type is distinct from 'suppressed'
    order by status, tenant_id
    limit %(undecided)s
) as counted
union all
select 'pending', count(*) filter (where tenant_id = %(tenant_id)s), count(*)
from (
    select tenant_id from dispatcher.email_log
    where status between 'pending' and 'pending'
    order by status, email_id
    limit %(limit)s
) as counted
union all
select 'sending', count(*) filter (where tenant_id = %(tenant_id)s), count(*)
from (
    select tenant_id from dispatcher.email_log
    where status between 'sending' and 'sending'
    order by status, email_id
    limit %(limit)s
) as counted
union all
select 'waiting', count(*) filter (where tenant_id = %(tenant_id)s), count(*)
from (
    select tenant_id from dispatcher.email_log
    where status between 'waiting' and 'waiting'
    order by status, email_id
    limit %(limit)s
) as counted
union all
select 'cancelled', count(*) filter (where tenant_id = %(tenant_id)s), count(*)
from (
    select tenant_id from dispatcher.email_log
    where status between 'cancelled' and 'cancelled'
    order by status, email_id
    limit %(limit)s
) as counted;

-- name: count_paused
-- How many of the first `limit` pending emails are stopped by a pause of everything, of a lane or of a tenant; and how
-- many emails were read.
with {paused}
select count(*) filter (where {is_paused}), count(*)
from (
    select lane, tenant_id
    from dispatcher.email_log
    where status between 'pending' and 'pending'
    order by status, email_id
    limit %(limit)s
) as e;

-- name: measure_recent_latency
-- As measure_latency (see status.sql), but reads a bounded number of emails: the newest `limit` emails, and the newest
-- `limit` emails that were enqueued before the oldest pending email. The second group is needed because, during a
-- backlog, the newest emails are not sent yet.
select
    count(*) as emails,
    percentile_cont(0.5) within group (order by extract(epoch from sent_at - since)) as p50_seconds,
    percentile_cont(0.95) within group (order by extract(epoch from sent_at - since)) as p95_seconds,
    percentile_cont(0.99) within group (order by extract(epoch from sent_at - since)) as p99_seconds
from (
    select sent_at, coalesce(due_since, created_at) as since
    from (
        (
            select email_id, sent_at, due_since, created_at, status
            from dispatcher.email_log
            order by email_id desc
            limit %(limit)s
        )
        union
        (
            select email_id, sent_at, due_since, created_at, status
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
        and isfinite(coalesce(due_since, created_at))
    order by sent_at desc
    limit 1000
) as newest
having count(*) > 0;

-- name: sum_attempts
-- Attempts by hour or day (`unit`, in UTC), provider and outcome, for the last `seconds`, oldest first. The first
-- hour or day is counted whole.
select date_trunc(%(unit)s, hour, 'UTC') as begins_at, provider, outcome, sum(email_count)::bigint
from dispatcher.email_hourly
where hour >= date_trunc(%(unit)s, statement_timestamp() - %(seconds)s::double precision * interval '1 second', 'UTC')
group by begins_at, provider, outcome
order by begins_at, provider, outcome;

-- name: list_rates
-- For each provider with a ceiling: how many emails per second all hosts together may send now, and whether the
-- provider has throttled us in the last minute.
select
    provider,
    per_second,
    halved_at > clock_timestamp() - interval '1 minute'
from dispatcher.provider_rate
order by provider;

-- name: list_host_reports
-- The monitors that did not stop in an orderly way: host, seconds since the last report, version, and processes.
select host, extract(epoch from clock_timestamp() - seen_at)::double precision, version, processes
from dispatcher.host_presence
order by host, seen_at desc;

-- name: find_alert_check
-- The last check of a DLQ: host, seconds since the check, depth, why RabbitMQ could not be read, and the active alerts.
-- No row: no monitor has checked the DLQ.
select host, extract(epoch from clock_timestamp() - checked_at)::double precision, depth, fault, alerts
from dispatcher.alert_check
where queue = %(queue)s;
