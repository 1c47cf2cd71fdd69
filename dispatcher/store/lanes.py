"""Reads and writes what operators set for lanes and senders. Each change is audited in the same statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dispatcher.domain.controls import LanePolicy, LaneRule
from dispatcher.store.statements import Source, fetch

Author = Mapping[str, str]
"""The `actor` and the `reason` of the audit record."""


async def list_rules(source: Source) -> list[LaneRule]:
    """The rules that set the lane of a sender's emails, ordered by sender."""
    return await fetch(source, "list_lane_rules", into=LaneRule)


async def set_policy(
    source: Source, lane: str, values: Mapping[str, Any], author: Author, *, default_weight: float
) -> LanePolicy:
    """Changes the policy of a lane. A None in `values` keeps the current value. Returns the new policy.

    Args:
        values: `weight`, `on_uncertain`, `max_attempts` and `redeliver_seconds`.
        default_weight: The weight of the lane if `values` has no weight, and the lane has no policy yet.
    """
    parameters = {"lane": lane, "default_weight": default_weight, **values, **author}
    (policy,) = await fetch(source, "set_lane_policy", parameters, into=LanePolicy)
    return policy


async def unset_policy(source: Source, lane: str, author: Author) -> bool:
    """Deletes the policy of a lane. Returns False if the lane had no policy."""
    return bool(await fetch(source, "unset_lane_policy", {"lane": lane, **author}))


async def set_rule(source: Source, rule: LaneRule, author: Author) -> None:
    """Sets the lane of a sender's emails."""
    await fetch(source, "set_lane_rule", {"sender": rule.sender, "lane": rule.lane, **author})


async def unset_rule(source: Source, sender: str, author: Author) -> bool:
    """Deletes the rule for a sender. Returns False if there is no such rule."""
    return bool(await fetch(source, "unset_lane_rule", {"sender": sender, **author}))


async def count_due(source: Source, *, pairs: int, most: int) -> list[tuple[str, str, int, float]]:
    """Counts the due emails of each pair of lane and tenant. Returns the lane, the tenant, the number of emails, and
    the seconds since the first of these emails became due.

    Args:
        pairs: Return at most this many pairs of lane and tenant.
        most: Count at most this many emails of each pair.
    """
    rows = await fetch(source, "count_due", {"pairs": pairs, "most": most})
    return [(lane, tenant_id, emails, seconds) for lane, tenant_id, emails, seconds in rows]
