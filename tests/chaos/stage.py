"""What a storm needs and the adversary can reach."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from threading import Timer
from typing import Any, Protocol
from uuid import UUID

from dispatcher.broker.topology import Topology
from tests.acceptance.rabbit import Rabbit
from tests.chaos.diary import Diary
from tests.chaos.harness import HarnessFailed
from tests.chaos.outages import Outages
from tests.chaos.producers import Producers
from tests.chaos.subject import Subject
from tests.store.steered_clock import SteeredClock
from tests.supervisor.program import Event, Program


class Provider(Protocol):
    """The provider's end: a double with a ledger of what it accepted and a record of what it saw on the wire."""

    program: Program

    @property
    def settings(self) -> Mapping[str, str]:
        """What makes a dispatcher send there."""
        ...

    def delivered(self) -> Counter[UUID]:
        """How often each email was accepted."""
        ...

    @property
    def ledger_octets(self) -> int:
        """The size of its ledger, which grows with each email that it accepts."""
        ...

    def witnessed(self) -> list[dict[str, Any]]:
        """What it saw on the wire."""
        ...

    def behave(self, **behaviour: object) -> None:
        """Behaves so from now on; what is not named is reset."""
        ...

    def kill(self) -> None:
        """Ends it."""
        ...


@dataclass(slots=True)
class Stage:
    """Everything in it is real, but for the provider.

    Attributes:
        hosts: Each a `dispatcher run` with a name, a run directory and perhaps a network of its own.
        provider_name: Which one the double stands for: `sendgrid` or `smtp`.
        clock: What PostgreSQL's clock shows.
        lease_seconds: How long a worker owns an email; freezes last longer.
        latency_ms: The provider's, unless the adversary makes it slower.
        shares_broker: Whether others use the same RabbitMQ: then only our own workers' connections may be cut.
        calm: What is to be done later, unless the storm ends before: see `later`.
    """

    database_url: str
    topology: Topology
    hosts: Sequence[Subject]
    producers: Producers
    provider: Provider
    provider_name: str
    rabbit: Rabbit
    outages: Outages
    clock: SteeredClock
    diary: Diary
    lease_seconds: float
    latency_ms: int
    shares_broker: bool
    calm: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _hung: dict[int, Timer] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    def later(self, seconds: float, deed: Callable[[], object]) -> None:
        """Has something done in so long, or at once when the storm ends."""
        heappush(self.calm, (time.monotonic() + seconds, next(self._numbers), deed))

    def step(self, *, everything: bool = False) -> None:
        """Does what is due, and keeps what the storm has felled going.

        Raises:
            HarnessFailed: a producer or the provider's double has ended.
        """
        until = math.inf if everything else time.monotonic()
        due = []
        while self.calm and self.calm[0][0] <= until:
            due.append(heappop(self.calm)[2])
        for deed in due:
            deed()  # may put itself off
        self.outages.step()
        self.producers.revive()
        if (code := self.provider.program.exit_code) is not None:
            raise HarnessFailed(f"the provider's double ended with {code}:\n{self.provider.program.words[-2000:]}")
        for host in self.hosts:
            self._restart(host)

    def behave(self, **behaviour: object) -> None:
        """The double behaves so from now on, with the usual latency unless another is named."""
        self.provider.behave(**{"latency_ms": self.latency_ms, **behaviour})

    def find(self, role: str) -> list[int]:
        """The living processes of a role on all hosts; see `Subject.find`."""
        return [pid for host in self.hosts for pid in host.find(role)]

    def events(self, name: str) -> list[Event]:
        """The log events of every run of every host."""
        return [event for host in self.hosts for event in host.events(name)]

    def hang(self, pid: int, seconds: float) -> None:
        """SIGSTOPs a backend of PostgreSQL for so long; raises ProcessLookupError if it is gone."""
        os.kill(pid, signal.SIGSTOP)
        # By a thread of its own: the backend may hold a lock that our next statement needs.
        self._hung[pid] = Timer(seconds, _wake, [pid])
        self._hung[pid].start()

    def wake(self) -> None:
        """SIGCONTs all backends that hang; a server whose backend hangs could not end."""
        for pid, timer in self._hung.items():
            timer.cancel()
            _wake(pid)
        self._hung.clear()

    @property
    def has_hung(self) -> bool:
        """Whether a backend hangs now."""
        return any(timer.is_alive() for timer in self._hung.values())

    def _restart(self, host: Subject) -> None:
        """Starts the dispatcher again if it has ended, and says so if it should not have."""
        code = host.program.exit_code
        if code is None:
            return
        was_asked = host.was_asked_to_end
        # What could not be recorded in the drain's time was killed: exit 1, and the next run settles it. A run that had
        # not begun yet ends by the signal itself.
        if code not in ((0, 1, -9, -15) if was_asked else (-9,)):
            self.diary.blame(
                f"the run of {host.name} ended with {code} {'after SIGTERM' if was_asked else 'by itself'}"
            )
        host.start()


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
