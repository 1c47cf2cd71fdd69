"""What a storm needs and the adversary can reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from dispatcher.broker.topology import Topology
from tests.acceptance.double import Double
from tests.acceptance.rabbit import Rabbit
from tests.chaos.diary import Diary
from tests.chaos.outages import Outages
from tests.chaos.producers import Producers
from tests.chaos.subject import Subject


@dataclass(slots=True)
class Stage:
    """Everything in it is real, but for the provider.

    Attributes:
        lease_seconds: How long a worker owns an email; freezes last longer.
        latency_ms: The provider's, unless the adversary makes it slower.
        shares_broker: Whether others use the same RabbitMQ: then only our own workers' connections may be cut.
        calm: What is to be done later, unless the storm ends before: see `later`.
    """

    database_url: str
    topology: Topology
    subject: Subject
    producers: Producers
    double: Double
    rabbit: Rabbit
    outages: Outages
    diary: Diary
    lease_seconds: float
    latency_ms: int
    shares_broker: bool
    calm: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def later(self, seconds: float, deed: Callable[[], object]) -> None:
        """Has something done in so long, or at once when the storm ends."""
        heappush(self.calm, (time.monotonic() + seconds, next(self._numbers), deed))

    def step(self, *, everything: bool = False) -> None:
        """Does what is due, and keeps what the storm has felled going."""
        while self.calm and (everything or self.calm[0][0] <= time.monotonic()):
            heappop(self.calm)[2]()
        self.outages.step()
        self.producers.revive()
        self._restart()

    def behave(self, **behaviour: object) -> None:
        """The double behaves so from now on, with the usual latency unless another is named."""
        self.double.behave(**{"latency_ms": self.latency_ms, **behaviour})

    def _restart(self) -> None:
        """Starts the dispatcher again if it has ended, and says so if it should not have."""
        code = self.subject.program.exit_code
        if code is None:
            return
        was_asked = self.subject.was_asked_to_end
        # What could not be recorded in the drain's time was killed: exit 1, and the next run settles it. A run that had
        # not begun yet ends by the signal itself.
        if code not in ((0, 1, -9, -15) if was_asked else (-9,)):
            self.diary.blame(f"the run ended with {code} {'after SIGTERM' if was_asked else 'by itself'}")
        self.subject.start()
