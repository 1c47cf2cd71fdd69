-- name: begin_rate
-- Makes a provider's bucket, empty, if there is none; a row per bucket that it made.
insert into dispatcher.provider_rate (provider, per_second, tokens, refilled_at)
values (%(provider)s, %(ceiling)s, 0, clock_timestamp())
on conflict (provider) do nothing
returning provider;

-- name: take_tokens
-- Takes up to `wanted` whole tokens of a provider's bucket; returns how many, and the rate now. No row: no bucket.
-- The bucket fills at the rate and holds at most `burst`; the rate climbs back to the ceiling, by a twentieth of it a
-- second, after it was halved. The clock is read once the row is ours: read before, it would be behind that of whoever
-- had the row meanwhile, and the time between would be counted twice. Where the row is of a time to come, the clock was
-- set back, or the server is another one: the bucket would give nothing until then.
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
-- Halves a provider's rate and empties its bucket, at most once a second, however many emails were throttled at once.
-- A row if it did.
update dispatcher.provider_rate
set
    per_second = greatest(%(ceiling)s / 64, per_second / 2),
    tokens = 0,
    refilled_at = clock_timestamp(),
    halved_at = clock_timestamp()
where provider = %(provider)s
    and halved_at < clock_timestamp() - interval '1 second'
returning per_second;

-- name: set_provider_state
-- A worker slot's view of a provider, from now on; `seconds` is how long it lasts, null where nobody knows.
insert into dispatcher.provider_state (provider, slot, state, reason, until_at)
values (
    %(provider)s, %(slot)s, %(state)s, %(reason)s,
    clock_timestamp() + %(seconds)s::double precision * interval '1 second'
)
on conflict (provider, slot) do update
set
    state = excluded.state,
    reason = excluded.reason,
    until_at = excluded.until_at,
    changed_at = clock_timestamp()
returning provider;

-- name: list_troubles
-- The providers that some worker cannot use now, by name: the worst state that a worker reports (of equal ones, the one that
-- lasts longest), how many workers report one, its reason, and how many seconds it lasts (null: unknown). A living worker
-- reports again when a state's time is over. One that has not for a minute is dead, and so is one that has been silent for an
-- hour.
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

-- name: forget_provider_states
-- A worker that ends has no view of providers any more; neither has one that begins. A row per view that went.
delete from dispatcher.provider_state
where slot = %(slot)s
returning provider;
