-- name: find_last_sample
-- The newest sample, and its age in seconds. `attempts` by outcome are since the first sample, `counted` since
-- `counted_since`, the beginning of the last two hours that it counted. No row: there is no sample.
select extract(epoch from clock_timestamp() - taken_at)::double precision, attempts, counted_since, counted
from dispatcher.minute_sample
order by minute desc
limit 1;

-- name: sum_attempts_for_sample
-- Counts attempts for a sample: a row per outcome. Returns the beginning of the previous clock hour, the outcome, the
-- attempts from the hour `since` on (null: from the previous clock hour on), and the attempts from the previous clock
-- hour on. If there are no attempts, returns one row with a null outcome.
with bounds as (
    select date_trunc('hour', statement_timestamp(), 'UTC') - interval '1 hour' as next_since
)
select
    b.next_since,
    h.outcome,
    coalesce(sum(h.email_count), 0)::bigint,
    coalesce(sum(h.email_count) filter (where h.hour >= b.next_since), 0)::bigint
from bounds as b
left join dispatcher.email_hourly as h on h.hour >= least(coalesce(%(since)s::timestamptz, b.next_since), b.next_since)
group by b.next_since, h.outcome;

-- name: save_sample
-- Stores the sample of this minute, or replaces an earlier sample of the same minute. Also deletes the samples that are
-- older than `days`. Returns how many emails operators and applications cancelled from a minute before the last sample
-- until a minute ago, because a younger cancellation may not be committed yet. The last sample is read here: while this
-- monitor counted emails, another one may have stored it. No row: another monitor has just stored a sample. A sample may
-- be of the future if PostgreSQL's clock was set back.
with deleted as (
    delete from dispatcher.minute_sample
    where minute < statement_timestamp() - %(days)s * interval '1 day'
)
insert into dispatcher.minute_sample (
    minute, taken_at, emails, oldest_pending_seconds, longest_due_seconds, queues, attempts, counted_since, counted,
    p50_seconds, p99_seconds
)
values (
    date_trunc('minute', statement_timestamp()), statement_timestamp(), %(emails)s::jsonb,
    %(oldest_pending_seconds)s::double precision, %(longest_due_seconds)s::double precision, %(queues)s::jsonb,
    %(attempts)s::jsonb, %(counted_since)s::timestamptz, %(counted)s::jsonb, %(p50_seconds)s::double precision,
    %(p99_seconds)s::double precision
)
on conflict (minute) do update
set
    taken_at = excluded.taken_at,
    emails = excluded.emails,
    oldest_pending_seconds = excluded.oldest_pending_seconds,
    longest_due_seconds = excluded.longest_due_seconds,
    queues = excluded.queues,
    attempts = excluded.attempts,
    counted_since = excluded.counted_since,
    counted = excluded.counted,
    p50_seconds = excluded.p50_seconds,
    p99_seconds = excluded.p99_seconds
where minute_sample.taken_at not between
    clock_timestamp() - %(every_seconds)s::double precision * interval '1 second' and clock_timestamp()
returning (
    select count(*)
    from dispatcher.operator_audit
    where action = 'cancel'
        and actor <> 'expiry'  -- the relay counts expired emails
        and acted_at > (
            select taken_at - interval '1 minute' from dispatcher.minute_sample order by minute desc limit 1
        )
        and acted_at <= statement_timestamp() - interval '1 minute'
);

-- name: list_trend
-- The worst of each ten minutes of the last 24 hours, oldest first.
select
    date_bin('10 minutes', minute, 'epoch') as begins_at, max(longest_due_seconds) as longest_due_seconds,
    max(p50_seconds) as p50_seconds, max(p99_seconds) as p99_seconds,
    max((queues -> 'dlq' ->> 'messages')::bigint) as dlq_messages
from dispatcher.minute_sample
where minute >= statement_timestamp() - interval '24 hours'
group by begins_at
order by begins_at;

-- name: list_samples
-- The samples of the last `minutes`, oldest first.
select
    minute, taken_at, extract(epoch from clock_timestamp() - taken_at)::double precision, emails,
    oldest_pending_seconds, longest_due_seconds, queues, attempts
from dispatcher.minute_sample
where minute >= date_trunc('minute', statement_timestamp()) - %(minutes)s * interval '1 minute'
order by minute;
