"""Faults of a cluster, one at a time, while the storm goes on; and how long nothing was accepted after each.

A deed blocks until the cluster is whole, so it runs in a thread of its own; the storm's loop only looks whether it is
through. Standstill: the longest time without an acceptance at the provider that began after the deed and before the
next one. The producers never stop, so that emails are due all the while.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Final

from tests.acceptance.outages import Removable
from tests.chaos.cluster import Cluster
from tests.chaos.cluster_deeds import CLUSTER_DEEDS
from tests.chaos.outages import Outages

CALM_SECONDS: Final = 6.0
"""Between two faults."""
LAST_SECONDS: Final = 40.0
"""Before the end of a storm no more faults begin."""
MOST_STANDSTILL_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A deed and its time, in Unix seconds.

    Attributes:
        whole_at: When the cluster was whole again.
        quorum_since: When a lost quorum was there again; None if none was lost.
    """

    name: str
    began_at: float
    whole_at: float | None = None
    quorum_since: float | None = None


@dataclass(frozen=True, slots=True)
class Standstill:
    """What followed a fault.

    Attributes:
        seconds: The longest time without an acceptance.
        seconds_after_quorum: The same since a lost quorum was there again; otherwise equal.
    """

    fault: Fault
    seconds: float
    seconds_after_quorum: float

    @property
    def is_too_long(self) -> bool:
        """Whether the dispatcher is to blame for it."""
        return self.seconds_after_quorum > MOST_STANDSTILL_SECONDS


class Faults(Outages):
    """Plays the deeds in an order that the seed draws; all of them before any comes again.

    Attributes:
        faults: Those that have begun.
        ended_at: When the storm was over.
    """

    def __init__(
        self,
        cluster: Cluster,
        queue: str,
        *,
        seed: int,
        seconds: float,
        names: Sequence[str] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Begins with the first `step`.

        Args:
            queue: The send queue, whose leader is struck.
            seconds: The storm's.
            names: These deeds, in this order, once each.
        """
        super().__init__(Removable(cluster.servers), ())
        self.faults: list[Fault] = []
        self.ended_at = 0.0
        self._cluster = cluster
        self._queue = queue
        self._seconds = seconds
        self._random = Random(f"the faults of {seed}")
        self._order = list(names) if names else self._random.sample(list(CLUSTER_DEEDS), len(CLUSTER_DEEDS))
        self._repeats = names is None
        self._tell = tell
        self._next_at: float | None = None
        self._last_at = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fault")
        self._deed: Future[float | None] | None = None

    def is_away(self, name: str) -> bool:  # noqa: ARG002 - one fault may concern any client of any server
        """Whether it may be unusable."""
        return self._deed is not None

    @property
    def is_over(self) -> bool:
        """Whether the cluster is whole."""
        return self._deed is None

    @property
    def told(self) -> str:
        """What is not over, in words."""
        return self.faults[-1].name if self._deed else ""

    def heal(self) -> None:
        """No fault begins any more; the one that is played heals itself."""
        self._last_at = 0.0
        self.ended_at = time.time()

    def step(self) -> None:
        """Ends what is through, and begins what is due; raises what broke a deed."""
        now = time.monotonic()
        if self._next_at is None:
            self._next_at, self._last_at = now + CALM_SECONDS, now + self._seconds - LAST_SECONDS
        if self._deed is not None and self._deed.done():
            quorum_since = self._deed.result()
            self.faults[-1] = replace(self.faults[-1], whole_at=time.time(), quorum_since=quorum_since)
            self._deed = None
            self._next_at = now + CALM_SECONDS
            self._tell(f"whole again after {time.time() - self.faults[-1].began_at:.0f} s: {self.faults[-1].name}")
        if self._deed is None and self._next_at <= now < self._last_at and self._order:
            self._begin(self._order.pop(0))

    def _begin(self, name: str) -> None:
        if self._repeats:
            self._order.append(name)
        self._tell(name)
        self.faults.append(Fault(name, time.time()))
        self._deed = self._pool.submit(CLUSTER_DEEDS[name], self._cluster, self._queue, self._random)


def standstills(faults: Sequence[Fault], accepted_at: Sequence[float], ended_at: float) -> list[Standstill]:
    """How long nothing was accepted after each fault.

    Args:
        faults: In their order.
        accepted_at: When the provider accepted an email, sorted.
        ended_at: When the storm was over: what is measured ends there.
    """
    ends = [*(fault.began_at for fault in faults[1:]), ended_at]
    return [
        Standstill(
            fault,
            _longest(accepted_at, fault.began_at, end, ended_at),
            _longest(accepted_at, fault.quorum_since or fault.began_at, end, ended_at),
        )
        for fault, end in zip(faults, ends, strict=True)
    ]


def _longest(accepted_at: Sequence[float], since: float, until: float, ended_at: float) -> float:
    """The longest time without an acceptance that began between two instants; it may end after them."""
    first, last = bisect_right(accepted_at, since), bisect_right(accepted_at, until)
    moments = [since, *accepted_at[first : last + 1]]
    if last == len(accepted_at):
        moments.append(ended_at)
    return max((min(late, ended_at) - early for early, late in pairwise(moments)), default=0.0)
