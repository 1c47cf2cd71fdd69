"""Reports events as a provider does: late, up to 46 times, in any order, and about some emails never. Also forges
some."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final
from uuid import UUID

from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from tests.chaos.event_sources import EventSource
from tests.chaos.plan import HarnessFailed

LOOK_SECONDS: Final = 0.3
RETRY_SECONDS: Final = 1.0
FINISH_SECONDS: Final = 60.0
MEAN_DELAY_SECONDS: Final = 2.0
SHARE_SILENT: Final = 0.04
"""The share of emails about which the provider never reports an event."""
SHARE_REPEATED: Final = 0.01
"""The share of events that the provider reports `MOST_TIMES` times."""
MOST_TIMES: Final = 46
SHARE_FORGED: Final = 0.2
"""After this share of requests, a forged request follows."""
TWILIO: Final = "twilio"
FORGED: Final = EventKind.UNSUBSCRIBED
BATCH: Final = 200
_KINDS: Final = (
    EventKind.ACCEPTED,
    EventKind.DEFERRED,
    EventKind.DELIVERED,
    EventKind.OPENED,
    EventKind.BOUNCED,
    EventKind.COMPLAINED,
)


def event_of(email_id: UUID, kind: EventKind, provider: str, happened_at: datetime) -> ProviderEvent:
    """An event without a recipient."""
    bounce = Bounce.SOFT if kind is EventKind.BOUNCED else None
    return ProviderEvent(email_id=email_id, provider=provider, kind=kind, bounce=bounce, happened_at=happened_at)


class Reporter:
    """Runs in a thread of its own, from its creation until `finish` or `stop`.

    Attributes:
        source: Delivers the events.
        reported: The emails of which an event was stored.
        refused_forgeries: Forged requests that the dispatcher refused.
        accepted_forgeries: Forged requests that the dispatcher accepted.
    """

    def __init__(self, source: EventSource, provider: str, seed: int) -> None:
        self.source = source
        self.reported: set[UUID] = set()
        self.refused_forgeries = 0
        self.accepted_forgeries = 0
        self._provider = provider
        self._random = Random(f"the events of {seed}")
        self._known: set[UUID] = set()
        self._due: list[tuple[float, int, ProviderEvent]] = []
        self._numbers = count()
        self._lock = threading.Lock()
        self._is_finishing = threading.Event()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def observe(self, accepted: Iterable[UUID], sms: Collection[UUID] = ()) -> None:
        """Schedules the events of emails, and of `sms` among them, that the provider has accepted. Call this again with
        all accepted emails."""
        with self._lock:
            for email_id in sorted(set(accepted) - self._known):
                self._known.add(email_id)
                if self._random.random() >= SHARE_SILENT:
                    self._schedule(email_id, TWILIO if email_id in sms else self._provider)

    def _schedule(self, email_id: UUID, provider: str) -> None:
        random, now = self._random, datetime.now(UTC)
        for kind in random.sample(_KINDS, random.randint(1, 3)):
            event = event_of(email_id, kind, provider, now + timedelta(seconds=random.uniform(-5, 5)))
            times = MOST_TIMES if random.random() < SHARE_REPEATED else random.choice((1, 1, 2, 3))
            for _ in range(times):
                due_at = time.monotonic() + random.expovariate(1 / MEAN_DELAY_SECONDS)
                heappush(self._due, (due_at, next(self._numbers), event))

    def finish(self) -> None:
        """Reports all remaining events at once, and returns when they are stored.

        Raises:
            HarnessFailed: They could not be stored in time, or the thread has failed.
        """
        self._is_finishing.set()
        ends_at = time.monotonic() + FINISH_SECONDS
        while self._thread.is_alive() and time.monotonic() < ends_at:
            self.source.step()
            self._thread.join(LOOK_SECONDS)
        if self._thread.is_alive() or self._due:
            raise HarnessFailed(f"{len(self._due)} events of the provider's double were not stored")

    def stop(self) -> None:
        """Ends the thread and the source without reporting more."""
        self._is_stopped.set()
        self._thread.join(FINISH_SECONDS)
        self.source.close()

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            batch = self._take()
            if not batch and self._is_finishing.is_set():
                return
            if not batch:
                time.sleep(LOOK_SECONDS)
            elif self.source.store(batch):
                self.reported |= {event.email_id for event in batch}
                self._forge(batch)
            else:
                self._put_back(batch)
                time.sleep(RETRY_SECONDS)

    def _forge(self, batch: Sequence[ProviderEvent]) -> None:
        """Sends forged events of a kind that no genuine event has."""
        if self._random.random() < SHARE_FORGED:
            forged = [replace(event, kind=FORGED, bounce=None) for event in batch]
            match self.source.forge(forged, self._random):
                case True:
                    self.refused_forgeries += 1
                case False:
                    self.accepted_forgeries += 1

    def _take(self) -> list[ProviderEvent]:
        """Up to `BATCH` events that are due, in random order."""
        until = float("inf") if self._is_finishing.is_set() else time.monotonic()
        batch: list[ProviderEvent] = []
        with self._lock:
            while self._due and self._due[0][0] <= until and len(batch) < BATCH:
                batch.append(heappop(self._due)[2])
        self._random.shuffle(batch)
        return batch

    def _put_back(self, events: Iterable[ProviderEvent]) -> None:
        with self._lock:
            for event in events:
                heappush(self._due, (time.monotonic() + RETRY_SECONDS, next(self._numbers), event))
