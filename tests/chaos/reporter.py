"""Reports events as a provider does: late, up to 46 times, in any order, and about some emails never. Forges some."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from random import Random
from typing import Final
from uuid import UUID

import orjson

from dispatcher.dev.ports import choose
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.errors import StoreUnavailable
from dispatcher.events.intake import EventIntake
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from tests.chaos.diary import Diary
from tests.chaos.plan import HarnessFailed
from tests.events.requests import SendGridKey, sendgrid_event
from tests.supervisor.program import Program

SENDGRID: Final = "sendgrid"
POST_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 2.0
MAX_AGE_SECONDS: Final = 3600
_COMMAND: Final = (sys.executable, "-m", "dispatcher.cli.main", "api")
_NAMES: Final = {
    EventKind.ACCEPTED: "processed",
    EventKind.DEFERRED: "deferred",
    EventKind.DELIVERED: "delivered",
    EventKind.OPENED: "open",
    EventKind.CLICKED: "click",
    EventKind.BOUNCED: "bounce",
    EventKind.COMPLAINED: "spamreport",
    EventKind.UNSUBSCRIBED: "unsubscribe",
}


class EventSource:
    """Delivers events from the thread of the reporter: posts those of SendGrid to a `dispatcher api`, signed as by
    SendGrid, and stores those of other providers directly."""

    def __init__(self, folder: Path, env: Mapping[str, str], diary: Diary, database_url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = make_pool(database_url, name="chaos events", size=1, lock_seconds=BATCH_LOCK_SECONDS)
        self._intake: EventIntake | None = None
        (self._port,) = choose(1)
        self._key = SendGridKey()
        self._folder = folder
        self._diary = diary
        self._env = {
            **env,
            "DISPATCHER_API_ADDRESS": f"127.0.0.1:{self._port}",
            "DISPATCHER_API_ALLOW_ANONYMOUS": "on",
            "DISPATCHER_SENDGRID_EVENTS_KEYS": self._key.public,
            "DISPATCHER_EVENTS_MAX_AGE_SECONDS": str(MAX_AGE_SECONDS),
        }
        self._numbers = count()
        self._was_killed = False
        self._api = self._started()

    def _started(self) -> Program:
        return Program(_COMMAND, self._folder, f"api-{next(self._numbers)}", env=self._env)

    def store(self, events: Sequence[ProviderEvent]) -> bool:
        """Delivers events. Returns whether the dispatcher has confirmed that they are stored; if not, repeat them."""
        own = [event for event in events if event.provider == SENDGRID]
        others = [event for event in events if event.provider != SENDGRID]
        body = _body(own)
        if own and self._post(body, self._key.headers(body)) != 204:
            return False
        with suppress(StoreUnavailable):
            self._loop.run_until_complete(self._store(others))
            return True
        return False

    async def _store(self, events: Sequence[ProviderEvent]) -> None:
        if self._intake is None:
            await self._pool.open()
            self._intake = EventIntake(self._pool, SuppressionRules())
        await self._intake.store(events)

    def forge(self, events: Sequence[ProviderEvent], random: Random) -> bool | None:
        """Sends events in a request that is signed by another key, changed afterwards, unsigned, or too old. Returns
        whether the dispatcher has refused the request; None if it did not answer."""
        body = _body(events)
        signed = self._key.headers(body)
        altered = orjson.dumps([*orjson.loads(body), *orjson.loads(body)])
        other = random.choice(
            [
                (body, SendGridKey().headers(body)),
                (altered, signed),
                (body, {}),
                (body, self._key.headers(body, time.time() - 2 * MAX_AGE_SECONDS)),
            ]
        )
        status = self._post(*other)
        return None if status is None or status >= 429 else status >= 400

    def _post(self, body: bytes, headers: Mapping[str, str]) -> int | None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=POST_SECONDS)
        try:
            connection.request("POST", "/v1/events/sendgrid", body, {"Content-Type": "application/json", **headers})
            return connection.getresponse().status
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()

    def kill(self) -> bool:
        if self._was_killed or self._api.exit_code is not None or not self._api.events("api.started"):
            return False
        self._was_killed = True
        self._diary.kill(self._api.pid)
        return True

    def step(self) -> None:
        """An API that ends by itself is a fault, unless it could not start without its servers."""
        if self._api.exit_code is None:
            return
        if not self._was_killed and self._api.events("api.started"):
            self._diary.note_fault(f"the API ended by itself with {self._api.exit_code}")
        self._was_killed = False
        self._api = self._started()

    def close(self) -> None:
        """Ends the source. Call this after the reporter's thread has ended."""
        self._api.destroy()
        with suppress(TimeoutError):
            self._loop.run_until_complete(asyncio.wait_for(self._pool.close(), CLOSE_SECONDS))
        self._loop.close()


def _body(events: Sequence[ProviderEvent]) -> bytes:
    return orjson.dumps(
        [
            sendgrid_event(event.email_id, _NAMES[event.kind], timestamp=int(event.happened_at.timestamp()))
            for event in events
        ]
    )


LOOK_SECONDS: Final = 0.3
RETRY_SECONDS: Final = 1.0
FINISH_SECONDS: Final = 60.0
MEAN_DELAY_SECONDS: Final = 2.0
SHARE_SILENT: Final = 0.04
SHARE_REPEATED: Final = 0.01
MOST_TIMES: Final = 46
SHARE_FORGED: Final = 0.2
"""After this share of requests, a forged request follows."""
TWILIO: Final = "twilio"
FORGED: Final = EventKind.UNSUBSCRIBED
BATCH: Final = 200
_KINDS: Final = [kind for kind in _NAMES if kind not in (EventKind.CLICKED, EventKind.UNSUBSCRIBED)]


def event_of(email_id: UUID, kind: EventKind, provider: str, happened_at: datetime) -> ProviderEvent:
    bounce = Bounce.SOFT if kind is EventKind.BOUNCED else None
    return ProviderEvent(email_id=email_id, provider=provider, kind=kind, bounce=bounce, happened_at=happened_at)


class Reporter:
    """Runs in a thread of its own, from its creation until `finish` or `stop`. `reported`: the emails of which an event
    was stored."""

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
        """Reports all remaining events at once, and returns when they are stored."""
        self._is_finishing.set()
        ends_at = time.monotonic() + FINISH_SECONDS
        while self._thread.is_alive() and time.monotonic() < ends_at:
            self.source.step()
            self._thread.join(LOOK_SECONDS)
        if self._thread.is_alive() or self._due:
            raise HarnessFailed(f"{len(self._due)} events of the provider's double were not stored")

    def stop(self) -> None:
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
