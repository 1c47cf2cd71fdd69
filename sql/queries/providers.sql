-- name: begin_rate
-- Creates an empty token bucket for a provider, unless the provider has one. Returns a row if the bucket was created.
insert into dispatcher.provider_rate (provider, per_second, tokens, refilled_at)
values (%(provider)s, %(ceiling)s, 0, clock_timestamp())
on conflict (provider) do nothing
returning provider;

-- name: take_tokens
-- Takes up to `wanted` whole tokens from a provider's bucket. Returns the number of tokens taken, and the current rate.
-- No row: the bucket does not exist.
-- The bucket fills at the rate and contains at most `burst` tokens. After the rate was halved, it grows back to the
-- ceiling, by a twentieth of the ceiling per second. The clock is read after the row is locked. If the clock were read
-- earlier, another session could store a later time first, and the time between the two readings would count twice. A
-- stored time in the future means that the clock was set back or the server was replaced; without a correction, the
-- bucket would stay empty until that time.
with locked as (
    select provider, per_second, tokens, refilled_at
    from dispatcher.provider_rate
    where provider = %(provider)s
    for update
),
timed as (
    select provider, per_second, tokens, refilled_at, clock_timestamp() as now
    from locked
),
passed as (
    select
        provider, per_second, tokens,
        case when refilled_at < now + interval '1 second' then greatest(refilled_at, now) else now end as at,
        greatest(0, extract(epoch from now - refilled_at)::double precision) as seconds
    from timed
),
recovered as (
    select provider, tokens, at, seconds, least(%(ceiling)s, per_second + seconds * %(ceiling)s / 20) as rate
    from passed
),
bucket as (
    select provider, at, rate, least(%(burst)s, tokens + seconds * rate) as available
    from recovered
)
update dispatcher.provider_rate as r
set
    per_second = b.rate,
    tokens = b.available - least(%(wanted)s, floor(b.available)),
    refilled_at = b.at
from bucket as b
where r.provider = b.provider
returning least(%(wanted)s, floor(b.available))::integer, r.per_second;

-- name: halve_rate
-- At most once per second, even if many emails are throttled at the same time. No row: halved less than a second ago.
update dispatcher.provider_rate
set
    per_second = greatest(%(ceiling)s / 64, per_second / 2),
    tokens = 0,
    refilled_at = clock_timestamp(),
    halved_at = clock_timestamp()
where provider = %(provider)s
    and halved_at < clock_timestamp() - interval '1 second'
returning per_second;

-- name: list_rates
-- For each provider with a ceiling: how many emails per second all hosts together may send now; whether the provider has
-- throttled us, and whether workers used it, in the last minute.
select
    provider,
    per_second,
    halved_at > clock_timestamp() - interval '1 minute',
    refilled_at > clock_timestamp() - interval '1 minute'
from dispatcher.provider_rate
order by provider;

-- name: set_provider_state
-- Stores the state of one worker slot's circuit breaker for a provider. `seconds`: how long the state lasts; null if
-- unknown. An operator's resume stays until the worker takes it, or its breaker closes.
insert into dispatcher.provider_state as s (provider, slot, state, reason, until_at)
values (
    %(provider)s, %(slot)s, %(state)s, %(reason)s,
    clock_timestamp() + %(seconds)s::double precision * interval '1 second'
)
on conflict (provider, slot) do update
set
    state = excluded.state,
    reason = excluded.reason,
    until_at = excluded.until_at,
    changed_at = clock_timestamp(),
    resumed_at = case when excluded.state <> 'closed' then s.resumed_at end
returning provider;

-- name: take_resumes
-- The providers that an operator has resumed while this slot cannot use them (see end_pause), each only once.
update dispatcher.provider_state
set resumed_at = null
where slot = %(slot)s
    and resumed_at is not null
returning provider;

-- name: find_troubles
-- Providers that at least one worker cannot use now, by name. Returns the worst reported state (of equal states, the
-- state that lasts longest), how many workers report a problem, the reason, and how many seconds the state lasts (null:
-- unknown). A running worker reports again when a state ends. So a report comes from a dead worker, and is ignored, if
-- its state ended more than a minute ago, or if it has no end and is an hour old.
select distinct on (provider)
    provider,
    state,
    count(*) over (partition by provider),
    reason,
    case
        when until_at is not null
            then greatest(extract(epoch from until_at - clock_timestamp()), 0)::double precision
    end
from dispatcher.provider_state
where state <> 'closed'
    and coalesce(until_at + interval '1 minute', changed_at + interval '1 hour') > clock_timestamp()
order by provider, array_position(array['open', 'half_open', 'paused'], state), until_at desc nulls last;

-- name: delete_provider_states
-- Deletes the states that a worker slot reported, when its worker starts or exits. Returns a row per deleted state.
delete from dispatcher.provider_state
where slot = %(slot)s
returning provider;
