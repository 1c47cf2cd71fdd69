-- name: list_domain_limits
-- The ceilings of recipient domains, by domain, each with the measured length of attempts.
select domain, per_second, concurrent, attempt_seconds
from dispatcher.domain_limit
order by domain;

-- name: set_domain_limit
-- A parameter that is null keeps the current value.
with changed as (
    insert into dispatcher.domain_limit as d (domain, per_second, concurrent)
    values (%(domain)s, %(per_second)s, %(concurrent)s)
    on conflict (domain) do update
    set
        per_second = coalesce(excluded.per_second, d.per_second),
        concurrent = coalesce(excluded.concurrent, d.concurrent)
    returning
        d.domain, d.per_second, d.concurrent, 'set_domain' as act,
        jsonb_build_object('domain', d.domain, 'per_second', d.per_second, 'concurrent', d.concurrent) as detail
),
{audited}
select domain, per_second, concurrent
from changed;

-- name: remove_domain_limit
-- Deletes the ceilings of a domain, and audits this. Zero rows: the domain has no ceilings.
with changed as (
    delete from dispatcher.domain_limit
    where domain = %(domain)s
    returning
        domain, per_second, concurrent, 'set_domain' as act,
        jsonb_build_object('domain', domain, 'removed', true) as detail
),
{audited}
select domain, per_second, concurrent
from changed;

-- name: claim_domain
-- Takes up to wanted_tokens whole tokens from a domain's bucket, and decides how many attempts this worker may make at
-- the same time until slot_seconds from now; null if the domain has no such ceiling. Adds the lengths of this worker's
-- attempts since its last claim to the mean length of attempts, each with the weight new_share. Zero rows: the domain
-- has no ceilings (any more).
-- The tokens are counted as in take_tokens, whose comment gives the reasons. The tokens and the shares of all workers
-- are in one row. The statement locks this row before it reads it: an earlier snapshot would not show what another
-- worker has just got.
-- This worker is making `used` attempts now, so these attempts count as taken, even if the worker may now make fewer.
-- If another worker wants more attempts than it has, this worker gets at most an equal share. A share that is not a
-- whole number is rounded up or down at random, so that a single slot moves from worker to worker. Two kinds of entries
-- do not count: an entry whose time has passed, because its worker has died, and an entry whose time is too far in the
-- future, because the clock was set back since.
with locked as (
    select domain, per_second, concurrent, tokens, refilled_at, holders
    from dispatcher.domain_limit
    where domain = %(domain)s
    for update
),
timed as (
    select domain, per_second, concurrent, tokens, refilled_at, holders, clock_timestamp() as now
    from locked
),
filled as (
    select
        domain, per_second, concurrent, holders, now,
        case when refilled_at < now + interval '1 second' then greatest(refilled_at, now) else now end as at,
        least(
            greatest(1, per_second * %(burst_seconds)s),
            tokens + greatest(0, extract(epoch from now - refilled_at)::double precision) * coalesce(per_second, 0)
        ) as available
    from timed
),
other as (
    select
        coalesce(
            jsonb_object_agg(h.worker, h.entry) filter (where h.worker is not null), jsonb_build_object()
        ) as holders,
        coalesce(sum((h.entry ->> 'held')::integer), 0) as held,
        count(h.worker) as workers,
        coalesce(bool_or((h.entry ->> 'held')::integer < (h.entry ->> 'wanted')::integer), false) as are_short
    from filled as f
    left join lateral jsonb_each(f.holders) as h (worker, entry)
        on h.worker <> %(worker)s
        and (h.entry ->> 'until')::double precision between extract(epoch from f.now)
            and extract(epoch from f.now) + 2 * %(slot_seconds)s
),
shared as (
    select
        f.domain, f.at, f.now, f.available, o.holders,
        case when f.per_second is not null then least(%(wanted_tokens)s, floor(f.available))::integer end as taken,
        case
            when f.concurrent is not null then greatest(
                0,
                least(
                    %(wanted_slots)s,
                    f.concurrent - o.held,
                    case
                        when o.are_short then floor(f.concurrent::double precision / (o.workers + 1) + random())
                        else f.concurrent
                    end
                )
            )::integer
        end as allowed
    from filled as f
    cross join other as o
)
update dispatcher.domain_limit as d
set
    tokens = s.available - coalesce(s.taken, 0),
    refilled_at = s.at,
    attempt_seconds = case
        when %(attempts)s = 0 then d.attempt_seconds
        else %(mean_seconds)s + coalesce(
            (d.attempt_seconds - %(mean_seconds)s) * power(1 - %(new_share)s::double precision, %(attempts)s), 0
        )
    end,
    holders = case
        when s.allowed is null or %(wanted_slots)s = 0 then s.holders
        else s.holders || jsonb_build_object(
            %(worker)s::text,
            jsonb_build_object(
                'held', greatest(%(used)s, s.allowed),
                'wanted', %(wanted_slots)s,
                'until', extract(epoch from s.now) + %(slot_seconds)s
            )
        )
    end
from shared as s
where d.domain = s.domain
returning s.taken, s.allowed, d.attempt_seconds;

-- name: wait_for_domains
-- Releases leases without an attempt, as `release` does, because the ceiling of a recipient domain is reached. The
-- waiting emails of a domain, lane and tenant are a group. Its row in `domain_line` contains the time at which the last
-- email of the group is due. Each new email of a group waits until one step after the group's last email. The groups of
-- a domain take turns. So a step is the time in which the domain gets one email for each of its groups, at the given
-- pace. An email that would wait longer than most_seconds waits about most_seconds, and must then wait again. If an id
-- is missing in the result, the worker has lost the lease of that email.
with asked as materialized (
    select
        a.email_id, a.lease_token, a.domain, a.lane, a.tenant_id, a.pace,
        row_number() over (partition by a.domain, a.lane, a.tenant_id order by a.email_id) as number
    from unnest(
        %(email_ids)s::uuid[], %(lease_tokens)s::bigint[], %(domains)s::text[], %(lanes)s::text[],
        %(tenant_ids)s::text[], %(paces)s::double precision[]
    ) as a (email_id, lease_token, domain, lane, tenant_id, pace)
),
grouped as (
    select domain, lane, tenant_id, count(*) as emails, max(pace) as pace
    from asked
    group by domain, lane, tenant_id
),
stepped as materialized (
    select
        g.domain, g.lane, g.tenant_id, g.emails,
        (
            1 + (
                select count(*)
                from dispatcher.domain_line as l
                where l.domain = g.domain
                    and (l.lane, l.tenant_id) <> (g.lane, g.tenant_id)
                    and l.until_at > now()
            )
        ) / g.pace * interval '1 second' as step
    from grouped as g
),
grown as (
    insert into dispatcher.domain_line as l (domain, lane, tenant_id, until_at)
    select domain, lane, tenant_id, now() + least(emails * step, %(most_seconds)s * interval '1 second')
    from stepped
    order by domain, lane, tenant_id
    on conflict (domain, lane, tenant_id) do update
    set until_at = least(
        greatest(l.until_at, now()) + (excluded.until_at - now()), now() + %(most_seconds)s * interval '1 second'
    )
    returning domain, lane, tenant_id, until_at
),
timed as (
    select
        a.email_id, a.lease_token, a.domain,
        case
            when g.until_at < now() + %(most_seconds)s * interval '1 second'
                then greatest(now(), g.until_at - (s.emails - a.number) * s.step)
            else now() + (0.75 + 0.5 * random()) * %(most_seconds)s * interval '1 second'
        end as until
    from asked as a
    join stepped as s on (s.domain, s.lane, s.tenant_id) = (a.domain, a.lane, a.tenant_id)
    join grown as g on (g.domain, g.lane, g.tenant_id) = (a.domain, a.lane, a.tenant_id)
)
update dispatcher.email_log as e
set
    status = 'waiting',
    wait_until = p.until,
    wait_reason = 'domain',
    wait_domain = p.domain,
    attempt_count = e.attempt_count - 1,
    locked_by = null,
    locked_until = 'epoch',
    published_at = null,
    publish_due_at = null
from timed as p
where {is_e_given}
    and e.email_id = p.email_id
    and (e.lease_token = p.lease_token and e.status = 'sending') is true
returning e.email_id;

-- name: list_awaited_domains
-- The domains for whose ceilings emails wait. Takes one step in the index per domain, however many emails wait.
with recursive waiting (domain) as (
    select min(wait_domain)
    from dispatcher.email_log
    where status = 'waiting'
        and wait_reason = 'domain'
    union all
    select (
        select min(e.wait_domain)
        from dispatcher.email_log as e
        where e.status = 'waiting'
            and e.wait_reason = 'domain'
            and e.wait_domain > waiting.domain
    )
    from waiting
    where waiting.domain is not null
)
select domain
from waiting
where domain is not null;

-- name: find_domain_waits
-- Emails that wait for a domain's ceiling and become due after an instant: when, and in how many seconds.
select email_id, wait_until, extract(epoch from wait_until - clock_timestamp())::double precision
from dispatcher.email_log
where status = 'waiting'
    and wait_reason = 'domain'
    and wait_domain = %(domain)s
    and isfinite(wait_until)
    and wait_until > greatest(%(after)s::timestamptz, clock_timestamp())
order by wait_until
limit %(limit)s
for no key update skip locked;

-- name: shorten_waits
-- Lets each email of find_domain_waits wait at most the given number of seconds from now. Returns a row per email.
update dispatcher.email_log as e
set wait_until = least(e.wait_until, clock_timestamp() + w.seconds * interval '1 second')
from unnest(%(email_ids)s::uuid[], %(seconds)s::double precision[]) as w (email_id, seconds)
where {is_e_given}
    and e.email_id = w.email_id
    and (e.status = 'waiting' and e.wait_reason = 'domain') is true
returning e.email_id;

-- name: shorten_group_waits
-- Lets later emails of a domain wait less, after shorten_waits. For each waiting group of the domain, multiplies by
-- `factor` the time until the last email of the group is due; a factor of 0 deletes the groups. Also deletes groups of
-- other domains whose last email became due more than an hour ago. Returns a row per group whose time was shortened.
with deleted as (
    delete from dispatcher.domain_line
    where (domain = %(domain)s and %(factor)s = 0)
        or (domain <> %(domain)s and until_at < now() - interval '1 hour')
)
update dispatcher.domain_line
set until_at = now() + (until_at - now()) * %(factor)s
where domain = %(domain)s
    and %(factor)s > 0
    and until_at > now()
returning domain;

-- name: count_domain_waits
-- The domains that have ceilings, with the number of emails that wait for each, at most `most`.
select
    d.domain, d.per_second, d.concurrent, d.attempt_seconds,
    (
        select count(*)
        from (
            select
            from dispatcher.email_log as e
            where e.status = 'waiting'
                and e.wait_reason = 'domain'
                and e.wait_domain = d.domain
            limit %(most)s
        ) as counted
    ) as waiting
from dispatcher.domain_limit as d
order by d.domain;
