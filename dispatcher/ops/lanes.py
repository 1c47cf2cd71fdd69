"""For operators: reads and sets lanes' weights and policies, and senders' lanes. Audits every change.

All hosts apply a change within two seconds. Policies and senders' lanes apply to emails that are enqueued afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from dispatcher.config import Settings
from dispatcher.domain.controls import Controls, LanePolicy, LaneRule
from dispatcher.domain.lane_weights import LaneWeights
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.store import lanes as store
from dispatcher.store.connections import AsyncSession
from dispatcher.store.controls import read_controls

MAX_ATTEMPTS: Final = 1000
MAX_REDELIVER_SECONDS: Final = 366 * 86_400
MOST_DUE: Final = 10_000
"""Due emails of a lane and tenant are counted up to this number."""
MOST_DUE_TENANTS: Final = 100
"""The most pairs of a lane and a tenant whose due emails are counted."""


class NothingSet(DispatcherError):
    """Nothing is set for this lane or sender."""


@dataclass(frozen=True, slots=True)
class LaneShare:
    """A lane, and what is in force for it.

    Attributes:
        policy: What operators set for the lane. If they set nothing, the policy contains only the default weight.
        share: The lane's part of the workers and rates while all lanes have emails, from 0 to 1.
        queue: The name of the lane's send queue.
    """

    policy: LanePolicy
    share: float
    queue: str


@dataclass(frozen=True, slots=True)
class Due:
    """The due emails of a tenant in a lane.

    Attributes:
        emails: The number of due emails, counted up to `MOST_DUE`.
        oldest_seconds: How many seconds ago the oldest of these emails became due.
    """

    lane: str
    tenant_id: str
    emails: int
    oldest_seconds: float


async def find_controls(session: AsyncSession) -> Controls:
    """Everything that operators set for lanes and tenants, and all pauses, as read at one moment."""
    return await read_controls(session)


async def list_rules(session: AsyncSession) -> list[LaneRule]:
    """The lanes that operators set for senders, ordered by sender."""
    return await store.list_rules(session)


async def count_due(session: AsyncSession) -> list[Due]:
    """The numbers of due emails, for at most `MOST_DUE_TENANTS` pairs of a lane and a tenant. Reads a limited part of
    an index."""
    return [Due(*row) for row in await store.count_due(session, pairs=MOST_DUE_TENANTS, most=MOST_DUE)]


async def list_shares(session: AsyncSession, settings: Settings) -> list[LaneShare]:
    """Every lane of DISPATCHER_LANES, most urgent first."""
    return shares(await read_controls(session), settings)


def shares(controls: Controls, settings: Settings) -> list[LaneShare]:
    """Like `list_shares`, from controls that the caller has already read."""
    weights = LaneWeights(settings.lanes)
    weights.update(controls.lanes)
    total = sum(map(weights.of, settings.lanes))
    return [
        LaneShare(
            controls.lanes.get(lane) or LanePolicy(lane, weights.of(lane)),
            weights.of(lane) / total,
            settings.queue_of(lane),
        )
        for lane in settings.lanes
    ]


async def set_policy(
    session: AsyncSession, lane: str, values: Mapping[str, Any], act: Act, settings: Settings
) -> LanePolicy:
    """Changes the given values of a lane's policy; returns the whole policy.

    Args:
        lane: One of DISPATCHER_LANES.
        values: The new `weight`, `on_uncertain`, `max_attempts` and `redeliver_seconds`. For each, None keeps the
            present value.
    """
    default_weight = LaneWeights(settings.lanes).of(lane)
    return await store.set_policy(session, lane, values, asdict(act), default_weight=default_weight)


async def unset_policy(session: AsyncSession, lane: str, act: Act) -> None:
    """Deletes what operators set for a lane. The defaults then apply again.

    Raises:
        NothingSet: nothing was set for the lane.
    """
    _require(lane, was_set=await store.unset_policy(session, lane, asdict(act)))


async def set_rule(session: AsyncSession, rule: LaneRule, act: Act) -> None:
    """Assigns a sender's emails to a lane."""
    await store.set_rule(session, rule, asdict(act))


async def unset_rule(session: AsyncSession, sender: str, act: Act) -> None:
    """Deletes the rule that assigns a sender's emails to a lane.

    Raises:
        NothingSet: no lane was set for the sender.
    """
    _require(sender, was_set=await store.unset_rule(session, sender, asdict(act)))


def describe_policy(policy: LanePolicy) -> str:
    """A sentence such as `Lane bulk: weight 5, no redelivery.` Leaves out what is not set."""
    parts = [f"weight {policy.weight:g}"]
    if policy.on_uncertain is not None:
        parts.append(f"on uncertain {policy.on_uncertain}")
    if policy.max_attempts is not None:
        parts.append(f"at most {policy.max_attempts} attempt{'' if policy.max_attempts == 1 else 's'}")
    if policy.redeliver_seconds is not None:
        parts.append(f"redelivery for {policy.redeliver_seconds:,g} s" if policy.redeliver_seconds else "no redelivery")
    return f"Lane {policy.lane}: {', '.join(parts)}."


def _require(subject: str, *, was_set: bool) -> None:
    if not was_set:
        raise NothingSet(f"Nothing is set for {subject}.", remedy="See `dispatcher lanes list`.")
