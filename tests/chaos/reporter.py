"""Reports events as a provider does: late, up to 46 times, in any order, and about some emails never."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Final
from uuid import UUID

from dispatcher.domain.provider_event import Bounce, EventKind, ProviderEvent
from dispatcher.errors import StoreUnavailable
from dispatcher.events.intake import EventIntake
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from tests.chaos.harness import HarnessFailed

LOOK_SECONDS: Final = 0.3
RETRY_SECONDS: Final = 1.0
FINISH_SECONDS: Final = 60.0
MEAN_DELAY_SECONDS: Final = 2.0
SHARE_SILENT: Final = 0.04
"""The share of emails about which the provider never reports an event."""
SHARE_REPEATED: Final = 0.01
"""The share of events that the provider reports `MOST_TIMES` times."""
MOST_TIMES: Final = 46
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
        reported: The emails of which an event was stored.
    """

    def __init__(self, database_url: str, provider: str, seed: int) -> None:
        self.reported: set[UUID] = set()
        self._database_url = database_url
        self._provider = provider
        self._random = Random(f"the events of {seed}")
        self._known: set[UUID] = set()
        self._due: list[tuple[float, int, ProviderEvent]] = []
        self._numbers = count()
        self._lock = threading.Lock()
        self._is_finishing = threading.Event()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def observe(self, accepted: Iterable[UUID]) -> None:
        """Schedules the events of emails that the provider has accepted. Call this again with all accepted emails."""
        with self._lock:
            for email_id in sorted(set(accepted) - self._known):
                self._known.add(email_id)
                if self._random.random() >= SHARE_SILENT:
                    self._schedule(email_id)

    def _schedule(self, email_id: UUID) -> None:
        random, now = self._random, datetime.now(UTC)
        for kind in random.sample(_KINDS, random.randint(1, 3)):
            event = event_of(email_id, kind, self._provider, now + timedelta(seconds=random.uniform(-5, 5)))
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
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive() or self._due:
            raise HarnessFailed(f"{len(self._due)} events of the provider's double were not stored")

    def stop(self) -> None:
        """Ends the thread without reporting more."""
        self._is_stopped.set()
        self._thread.join(FINISH_SECONDS)

    async def _run(self) -> None:
        pool = make_pool(self._database_url, name="chaos events", size=1, lock_seconds=BATCH_LOCK_SECONDS)
        await pool.open()
        intake = EventIntake(pool)
        try:
            while not self._is_stopped.is_set():
                batch = self._take()
                if not batch:
                    if self._is_finishing.is_set():
                        return
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                try:
                    await intake.store(batch)
                except StoreUnavailable:
                    self._put_back(batch)
                    await asyncio.sleep(RETRY_SECONDS)
                else:
                    self.reported |= {event.email_id for event in batch}
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await pool.close()

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
