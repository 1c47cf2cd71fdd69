"""Decides how many due emails of each lane and tenant may be published now.

A lane's queue has room for a limited number of emails. Within the lane, tenants take turns by weight. A paused lane or
tenant gets no turns, and a tenant with a ceiling gets at most as many turns as it has tokens. Turns and tokens are kept
in the leader's memory. A new leader starts with empty token buckets, so no tenant exceeds its ceiling when the leader
changes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from dispatcher.domain.controls import Controls, TenantLimit
from dispatcher.domain.lanes import NORMAL
from dispatcher.domain.turns import Turns
from dispatcher.domain.values import dataclass, field
from dispatcher.store.outbox import DuePointer, Tenant

BURST_SECONDS: Final = 0.5
"""A tenant's token bucket holds at most the tokens for this many seconds. The relay looks for due emails more often
than that, so few tokens are lost."""


class SendQueue(Protocol):
    @property
    def room(self) -> int: ...

    @property
    def wait_seconds(self) -> float: ...

    def take(self, emails: int) -> None: ...

    async def publish(self, due: Sequence[DuePointer]) -> list[bool]: ...


@dataclass(slots=True)
class _Bucket:
    """The token bucket of a tenant that has a ceiling."""

    limit: TenantLimit
    tokens: float = 0.0
    filled_at: float = field(default_factory=time.monotonic)

    def fill(self) -> float:
        now = time.monotonic()
        rate = self.limit.per_second or 0.0
        self.tokens = min(self.tokens + rate * (now - self.filled_at), max(1.0, rate * BURST_SECONDS))
        self.filled_at = now
        return self.tokens

    @property
    def wait_seconds(self) -> float:
        return max(0.0, 1.0 - self.tokens) / (self.limit.per_second or 1.0)


class Shares:
    """Decides how many due emails of each lane and tenant may be published now."""

    def __init__(self, queues: Mapping[str, SendQueue]) -> None:
        """`queues`: most urgent first."""
        self._queues = queues
        self._controls = Controls()
        self._buckets: dict[str, _Bucket] = {}
        self._turns: dict[str, Turns] = {}
        self._wait_seconds = math.inf

    @property
    def wait_seconds(self) -> float:
        """The seconds until an email that the last `allot` left out may be published; infinite if it left out none."""
        return self._wait_seconds

    @property
    def paused_lanes(self) -> tuple[str, ...]:
        return self._controls.paused_lanes

    def set_controls(self, controls: Controls) -> None:
        self._controls = controls
        limited = {name: limit for name, limit in controls.tenants.items() if limit.per_second is not None}
        self._buckets = {name: self._buckets.get(name) or _Bucket(limit) for name, limit in limited.items()}
        for name, bucket in self._buckets.items():
            bucket.limit = limited[name]

    def queue_of(self, lane: str) -> SendQueue:
        """The lane's queue. Emails of a lane that this host does not know are sent in the normal lane."""
        return self._queues.get(lane) or self._queues[NORMAL]

    def allot(self, waiting: Mapping[Tenant, int], most: int) -> list[Tenant]:
        """Decides whose emails are published next: one tenant per turn, in order, each turn for one email. A turn
        reduces the room on the lane's queue, and uses a token if the tenant has a ceiling.

        `waiting` counts the due emails of each lane and tenant; a larger number if the exact one is unknown. Raises
        BrokerUnavailable.
        """
        self._wait_seconds = math.inf
        lanes: dict[str, dict[str, int]] = {}
        for (lane, tenant_id), emails in waiting.items():
            if self._controls.pause_of_lane(lane) is None and (allowed := self._allowed(tenant_id, emails)):
                lanes.setdefault(lane, {})[tenant_id] = allowed
        urgency = {lane: at for at, lane in enumerate(self._queues)}
        rooms = {lane: self._room(lane) for lane in sorted(lanes, key=lambda lane: urgency.get(lane, len(urgency)))}
        wanted = {lane: min(room, sum(lanes[lane].values())) for lane, room in rooms.items() if room}
        # Lanes have separate queues, so they share only the relay's time. Each open lane gets an equal part of the
        # batch, and what a lane does not need is for the others.
        parts: dict[str, int] = {}
        for lane in sorted(wanted, key=wanted.__getitem__):
            parts[lane] = min(wanted[lane], max(1, (most - sum(parts.values())) // (len(wanted) - len(parts))))
        order: list[Tenant] = []
        for lane in wanted:
            order += self._allot_in(lane, lanes[lane], min(self._room(lane), parts[lane]))
        return order

    def give_back(self, tenant: Tenant, emails: int) -> None:
        """Undoes turns from `allot` that the tenant had no email for: gives back their room and tokens."""
        lane, tenant_id = tenant
        self._turns[lane].charge(tenant_id, -emails)
        self._take(lane, tenant_id, -emails)

    def _allot_in(self, lane: str, waiting: dict[str, int], most: int) -> list[Tenant]:
        for tenant_id in waiting.keys() & self._buckets.keys():  # another lane may have used the tenant's tokens
            waiting[tenant_id] = min(waiting[tenant_id], int(self._buckets[tenant_id].tokens))
        turns = self._turns.get(lane)
        if turns is None:
            turns = self._turns[lane] = Turns(self._weight_of)
        order = turns.allot(waiting, most)
        for tenant_id, emails in Counter(order).items():
            self._take(lane, tenant_id, emails)
        tenants = {tenant_id: (lane, tenant_id) for tenant_id in waiting}
        return [tenants[tenant_id] for tenant_id in order]

    def _allowed(self, tenant_id: str, emails: int) -> int:
        """How many of the tenant's due emails its ceiling allows now; 0 if the tenant is paused."""
        if self._controls.pause_of_tenant(tenant_id) is not None:
            return 0
        bucket = self._buckets.get(tenant_id)
        if bucket is None:
            return emails
        tokens = int(bucket.fill())
        if not tokens:
            self._wait_seconds = min(self._wait_seconds, bucket.wait_seconds)
        return min(emails, tokens)

    def _room(self, lane: str) -> int:
        queue = self.queue_of(lane)
        room = queue.room
        if not room:
            self._wait_seconds = min(self._wait_seconds, queue.wait_seconds)
        return room

    def _take(self, lane: str, tenant_id: str, emails: int) -> None:
        self.queue_of(lane).take(emails)
        if bucket := self._buckets.get(tenant_id):
            bucket.tokens -= emails

    def _weight_of(self, tenant_id: str) -> float:
        limit = self._controls.tenants.get(tenant_id)
        return 1.0 if limit is None else limit.weight
