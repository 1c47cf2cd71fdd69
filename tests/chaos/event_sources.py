"""How the provider's events reach the dispatcher: through the HTTP API, as SendGrid posts them, or directly."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

import orjson

from dispatcher.dev.ports import choose
from dispatcher.domain.event import EventKind, ProviderEvent
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.errors import StoreUnavailable
from dispatcher.events.intake import EventIntake
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from tests.chaos.diary import Diary
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
    """Delivers events from the thread of the reporter: calls the intake in this process."""

    def __init__(self, database_url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = make_pool(database_url, name="chaos events", size=1, lock_seconds=BATCH_LOCK_SECONDS)
        self._intake: EventIntake | None = None

    def store(self, events: Sequence[ProviderEvent]) -> bool:
        """Delivers events. Returns whether the dispatcher has confirmed that they are stored; if not, repeat them."""
        try:
            self._loop.run_until_complete(self._store(events))
        except StoreUnavailable:
            return False
        return True

    async def _store(self, events: Sequence[ProviderEvent]) -> None:
        if self._intake is None:
            await self._pool.open()
            self._intake = EventIntake(self._pool, SuppressionRules())
        await self._intake.store(events)

    def forge(self, events: Sequence[ProviderEvent], random: Random) -> bool | None:  # noqa: ARG002
        """Sends events in a request that is not genuine. Returns whether the dispatcher has refused the request; None
        if it did not answer, or if this source cannot be forged."""
        return None

    def kill(self) -> bool:
        """Kills the process that receives the events; returns False if there is none."""
        return False

    def step(self) -> None:
        """Restarts the process if it was killed."""

    def close(self) -> None:
        """Ends the source. Call this after the reporter's thread has ended."""
        with suppress(TimeoutError):
            self._loop.run_until_complete(asyncio.wait_for(self._pool.close(), CLOSE_SECONDS))
        self._loop.close()


class WebhookSource(EventSource):
    """Posts signed requests to a `dispatcher api`, as SendGrid does. Stores the events of other providers directly."""

    def __init__(self, folder: Path, env: Mapping[str, str], diary: Diary, database_url: str) -> None:
        super().__init__(database_url)
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
        own = [event for event in events if event.provider == SENDGRID]
        others = [event for event in events if event.provider != SENDGRID]
        body = _body(own)
        is_stored = not own or self._post(body, self._key.headers(body)) == 204
        return is_stored and (not others or super().store(others))

    def forge(self, events: Sequence[ProviderEvent], random: Random) -> bool | None:
        """The request is signed by another key, changed afterwards, unsigned, or too old."""
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
        self._api.destroy()
        super().close()


def _body(events: Sequence[ProviderEvent]) -> bytes:
    return orjson.dumps(
        [
            sendgrid_event(event.email_id, _NAMES[event.kind], timestamp=int(event.happened_at.timestamp()))
            for event in events
        ]
    )
