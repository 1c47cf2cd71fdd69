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
