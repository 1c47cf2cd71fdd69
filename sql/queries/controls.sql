-- name: list_pauses
-- The pauses that have not ended, in the order in which they began.
select scope, name, until_at, reason, actor, began_at
from dispatcher.pause
where until_at is null
    or until_at > clock_timestamp()
order by began_at, scope, name;

-- name: list_lane_policies
-- What operators set for lanes.
select lane, weight, on_uncertain, max_attempts, redeliver_seconds
from dispatcher.lane_policy
order by lane;

-- name: list_tenant_limits
-- What operators set for tenants.
select tenant_id, weight, per_second
from dispatcher.tenant_limit
order by tenant_id;

-- name: find_paused
-- Which of these emails belong to one of these tenants or lanes.
select email_id
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and (tenant_id = any(%(tenants)s::text[]) or lane = any(%(lanes)s::text[])) is true;

-- name: put_back
-- Makes pending emails of paused tenants due again, as if they were not published, so that their messages can be acked.
-- They are due after away_seconds: by then, every relay has read the pause, and leaves them out. The relay that
-- published an email clears only the due mark that it has read (see mark_published). Returns these emails.
update dispatcher.email_log
set published_at = null, publish_due_at = clock_timestamp() + %(away_seconds)s * interval '1 second'
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s
    and (status = 'pending' and proven_by is null and tenant_id = any(%(tenants)s::text[])) is true
returning email_id;

-- name: find_pauses_of
-- The pauses in force that may stop an email: of everything, of its lane, of its tenant, and of every provider.
select p.scope, p.name, p.until_at, p.reason, p.actor, p.began_at
from dispatcher.email_log as e
join dispatcher.pause as p
    on p.scope in ('all', 'provider')
    or (p.scope = 'lane' and p.name = e.lane)
    or (p.scope = 'tenant' and p.name = e.tenant_id)
where e.email_id = %(email_id)s
    and (p.until_at is null or p.until_at > clock_timestamp())
order by p.began_at, p.scope, p.name;

-- name: begin_pause
-- Begins a pause that ends after `seconds`, or lasts until it is resumed (null). Replaces the end, the reason and the
-- actor of a pause that is in force. Audited; also deletes other pauses that have ended. Returns the pause.
with ended as (
    delete from dispatcher.pause
    where until_at <= clock_timestamp()
        and (scope, name) <> (%(scope)s, %(name)s)
),
begun as (
    insert into dispatcher.pause as p (scope, name, until_at, reason, actor)
    values (
        %(scope)s, %(name)s, clock_timestamp() + %(seconds)s::double precision * interval '1 second', %(reason)s,
        %(actor)s
    )
    on conflict (scope, name) do update
    set
        until_at = excluded.until_at,
        reason = excluded.reason,
        actor = excluded.actor,
        began_at = case when p.until_at <= clock_timestamp() then excluded.began_at else p.began_at end
    returning p.scope, p.name, p.until_at, p.reason, p.actor, p.began_at
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    select actor, 'pause', reason, jsonb_build_object('scope', scope, 'name', name, 'until', until_at)
    from begun
)
select scope, name, until_at, reason, actor, began_at
from begun;

-- name: end_pause
-- Ends a pause. Audited. Zero rows: there is no such pause, or it has ended.
with ended as (
    delete from dispatcher.pause
    where scope = %(scope)s
        and name = %(name)s
    returning scope, name, until_at, reason, actor, began_at
),
effective as (
    select scope, name, until_at, reason, actor, began_at
    from ended
    where until_at is null
        or until_at > clock_timestamp()
),
audited as (
    insert into dispatcher.operator_audit (actor, action, reason, detail)
    select %(actor)s, 'resume', %(reason)s, jsonb_build_object('scope', scope, 'name', name, 'since', began_at)
    from effective
)
select scope, name, until_at, reason, actor, began_at
from effective;
