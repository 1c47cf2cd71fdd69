-- name: list_pauses
-- The pauses that have not ended, in the order in which they began: all, or those that can stop an email.
select scope, name, until_at as until, reason, actor, began_at
from dispatcher.pause
where (until_at is null or until_at > clock_timestamp())
    and (
        %(email_id)s::uuid is null
        or scope in ('all', 'provider')
        or exists (
            select from dispatcher.email_log as e
            where e.email_id = %(email_id)s
                and (scope, name) in (('lane', e.lane), ('tenant', e.tenant_id))
        )
    )
order by began_at, scope, name;

-- name: find_paused_emails
-- For each given pause: how many due emails wait because of it, counted up to `most` (null: a provider's pause, because
-- other providers may send the emails); and whether an email of the tenant exists, or was tried by the provider in the
-- last 30 days (null: any other pause). Emails are compared as in find_due_of_tenants.
with recursive lane (name) as (
    select min(lane)
    from dispatcher.email_log
    where publish_due_at is not null
    union all
    select (
        select min(e.lane) from dispatcher.email_log as e where e.publish_due_at is not null and e.lane > lane.name
    )
    from lane
    where lane.name is not null
)
select
    case when p.scope <> 'provider' then due.emails end as waiting,
    case p.scope
        when 'tenant' then exists (select from dispatcher.email_idempotency as k where k.tenant_id = p.name)
        when 'provider' then exists (
            select from dispatcher.email_hourly as h where h.provider = p.name and h.hour > now() - interval '30 days'
        )
    end as has_emails
from unnest(%(scopes)s::text[], %(names)s::text[]) with ordinality as p (scope, name, position)
cross join lateral (
    select count(*)::integer as emails
    from (
        (
            select 1
            from dispatcher.email_log as e
            where p.scope = 'all'
                and e.publish_due_at <= now()
            limit %(most)s
        )
        union all
        (
            select 1
            from dispatcher.email_log as e
            where p.scope = 'lane'
                and e.lane = p.name
                and e.publish_due_at <= now()
            limit %(most)s
        )
        union all
        (
            select 1
            from lane
            join dispatcher.email_log as e
                on (e.lane, e.tenant_id, e.publish_due_at) >= (lane.name, p.name, '-infinity')
                and (e.lane, e.tenant_id, e.publish_due_at) <= (lane.name, p.name, now())
                and e.publish_due_at is not null
            where p.scope = 'tenant'
            limit %(most)s
        )
    ) as first
) as due
order by p.position;

-- name: list_lane_policies
-- Earlier releases stored weights that are no longer allowed, such as NaN. Such a weight counts as 1.
select
    lane, case when weight between 0.001 and 1000000 then weight else 1 end as weight, on_uncertain, max_attempts,
    redeliver_seconds
from dispatcher.lane_policy
order by lane;

-- name: list_tenant_limits
-- As list_lane_policies. A ceiling that is no longer allowed counts as the lowest ceiling, 0.001 emails per second.
select
    tenant_id, case when weight between 0.001 and 1000000 then weight else 1 end as weight,
    case when per_second not between 0.001 and 1000000 then 0.001 else per_second end as per_second
from dispatcher.tenant_limit
order by tenant_id;

-- name: find_paused
-- The given emails that belong to one of the given tenants or lanes.
select email_id
from dispatcher.email_log
where {is_given}
    and (tenant_id = any(%(tenants)s::text[]) or lane = any(%(lanes)s::text[])) is true;

-- name: put_back
-- Makes pending emails of paused tenants due again, so that the worker can acknowledge their messages. They are due
-- after away_seconds: by then, every relay has read the pause and leaves them out. The relay that published an email
-- does not clear the new due mark, because it clears only the due mark that it has read (see mark_published).
update dispatcher.email_log
set published_at = null, publish_due_at = clock_timestamp() + %(away_seconds)s * interval '1 second'
where {is_given}
    and (status = 'pending' and proven_by is null and tenant_id = any(%(tenants)s::text[])) is true
returning email_id;

-- name: begin_pause
-- Begins a pause, or replaces the end, reason and actor of a pause that is in force. for_seconds is null: until an
-- operator ends it. Audits this, and deletes other pauses that have ended.
with ended as (
    delete from dispatcher.pause
    where until_at <= clock_timestamp()
        and (scope, name) <> (%(scope)s, %(name)s)
),
changed as (
    insert into dispatcher.pause as p (scope, name, until_at, reason, actor)
    values (
        %(scope)s, %(name)s, clock_timestamp() + %(for_seconds)s::double precision * interval '1 second', %(reason)s,
        %(actor)s
    )
    on conflict (scope, name) do update
    set
        until_at = excluded.until_at,
        reason = excluded.reason,
        actor = excluded.actor,
        began_at = case when p.until_at <= clock_timestamp() then excluded.began_at else p.began_at end
    returning p.*, 'pause' as act, jsonb_build_object('scope', p.scope, 'name', p.name, 'until', p.until_at) as detail
),
{audited}
select scope, name, until_at as until, reason, actor, began_at
from changed;

-- name: end_pause
-- Ends a pause, and audits this. For a provider, also tells all workers whose circuit breaker is not closed to try the
-- provider again (see take_resumes), and makes emails due that workers postponed without an attempt: 10,000 at most, so
-- that the statement is short. They are due after 3 seconds, because by then every worker has read the end of the pause.
-- If only workers wait, returns their wait as a pause that the dispatcher began. Zero rows: there is no such pause, or it
-- has already ended, and no worker waits.
with ended as (
    delete from dispatcher.pause
    where scope = %(scope)s
        and name = %(name)s
    returning *, until_at is null or until_at > clock_timestamp() as was_in_force
),
resumed as (
    update dispatcher.provider_state
    set resumed_at = clock_timestamp()
    where %(scope)s = 'provider'
        and provider = %(name)s
        and state <> 'closed'
    returning until_at, reason, changed_at
),
postponed as (
    select email_id
    from dispatcher.email_log
    where %(scope)s = 'provider'
        and status = 'pending'
        and leased_at is not null
        and attempt_count = attempt_base
        and publish_due_at > clock_timestamp() + interval '3 seconds'
    order by publish_due_at
    limit 10000
    for no key update skip locked
),
hastened as (
    update dispatcher.email_log
    set publish_due_at = clock_timestamp() + interval '3 seconds'
    where email_id = any(array(select email_id from postponed))
),
over as (
    select scope, name, until_at, reason, actor, began_at
    from ended
    where was_in_force
    union all
    select %(scope)s, %(name)s, max(until_at), coalesce(min(reason), ''), 'dispatcher', min(changed_at)
    from resumed
    where not exists (select from ended where was_in_force)
    having count(*) > 0
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    select %(actor)s, 'resume', %(reason)s, jsonb_build_object('scope', scope, 'name', name, 'since', began_at)
    from over
)
select scope, name, until_at as until, reason, actor, began_at
from over;

-- name: list_lane_rules
-- The rules that set the lane of a sender's emails.
select sender, lane
from dispatcher.lane_rule
order by sender;

-- name: set_lane
-- Changes a lane's policy, or assigns a sender to the lane, or both. A parameter that is null keeps the current value.
-- The audit record of a sender contains only its domain, because the audit log contains no addresses.
with policy as (
    insert into dispatcher.lane_policy as p (lane, weight, on_uncertain, max_attempts, redeliver_seconds)
    select
        %(lane)s, coalesce(%(weight)s::double precision, %(default_weight)s::double precision), %(on_uncertain)s::text,
        %(max_attempts)s::integer, %(redeliver_seconds)s::double precision
    where num_nonnulls(
        %(weight)s::double precision, %(on_uncertain)s::text, %(max_attempts)s::integer,
        %(redeliver_seconds)s::double precision
    ) > 0
    on conflict (lane) do update
    set
        weight = coalesce(%(weight)s::double precision, p.weight),
        on_uncertain = coalesce(excluded.on_uncertain, p.on_uncertain),
        max_attempts = coalesce(excluded.max_attempts, p.max_attempts),
        redeliver_seconds = coalesce(excluded.redeliver_seconds, p.redeliver_seconds)
    returning p.lane, p.weight, p.on_uncertain, p.max_attempts, p.redeliver_seconds
),
assigned as (
    insert into dispatcher.lane_rule (sender, lane)
    select %(sender)s, %(lane)s
    where %(sender)s::text is not null
    on conflict (sender) do update
    set lane = excluded.lane
    returning sender, lane
),
changed (act, detail) as (
    select 'set_lane', to_jsonb(policy)
    from policy
    union all
    select 'set_lane', jsonb_build_object('lane', lane, 'sender_domain', substring(sender from '[^@]*$'))
    from assigned
),
{audited}
select
    l.lane, coalesce(c.weight, p.weight, %(default_weight)s::double precision) as weight,
    coalesce(c.on_uncertain, p.on_uncertain) as on_uncertain, coalesce(c.max_attempts, p.max_attempts) as max_attempts,
    coalesce(c.redeliver_seconds, p.redeliver_seconds) as redeliver_seconds
from (select %(lane)s::text as lane) as l
left join policy as c on c.lane = l.lane
left join dispatcher.lane_policy as p on p.lane = l.lane;

-- name: unset_lane
-- Deletes what operators set for a lane, or the lane of a sender's emails. Zero rows: nothing was set.
with unset as (
    delete from dispatcher.lane_policy
    where lane = %(lane)s::text
    returning lane
),
unassigned as (
    delete from dispatcher.lane_rule
    where sender = %(sender)s::text
    returning lane, sender
),
changed as (
    select
        lane, sender, 'set_lane' as act,
        jsonb_strip_nulls(
            jsonb_build_object('lane', lane, 'sender_domain', substring(sender from '[^@]*$'), 'unset', true)
        ) as detail
    from (select lane, null as sender from unset union all select lane, sender from unassigned) as deleted
),
{audited}
select lane, sender
from changed;

-- name: set_tenant_limit
-- A parameter that is null keeps the current value.
with changed as (
    insert into dispatcher.tenant_limit as t (tenant_id, weight, per_second)
    values (%(tenant_id)s, coalesce(%(weight)s::double precision, 1), %(per_second)s)
    on conflict (tenant_id) do update
    set
        weight = coalesce(%(weight)s::double precision, t.weight),
        per_second = coalesce(excluded.per_second, t.per_second)
    returning
        t.tenant_id, t.weight, t.per_second, 'set_tenant' as act,
        jsonb_build_object('tenant_id', t.tenant_id, 'weight', t.weight, 'per_second', t.per_second) as detail
),
{audited}
select tenant_id, weight, per_second
from changed;

-- name: unset_tenant_limit
-- Deletes what operators set for a tenant, and audits this. Zero rows: nothing was set.
with changed as (
    delete from dispatcher.tenant_limit
    where tenant_id = %(tenant_id)s
    returning
        tenant_id, weight, per_second, 'set_tenant' as act,
        jsonb_build_object('tenant_id', tenant_id, 'unset', true) as detail
),
{audited}
select tenant_id, weight, per_second
from changed;
