"""Waits before each new try while PostgreSQL is unreachable."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from dispatcher.domain.retry import Backoff
from dispatcher.errors import DispatcherError
from dispatcher.telemetry.log import get_log

LOCKED_SECONDS: Final = 0.5
"""The wait before the next try to write a row that another transaction has locked."""


class StoreOutage:
    """The current outage of PostgreSQL, shared by all stages of a worker. Enter `committing` around a commit and its
    retries: it reports to the parent how long the commit has taken so far."""

    def __init__(self, committing: AbstractContextManager[None] | None = None) -> None:
        self.committing = committing or nullcontext()
        self._backoff = Backoff(base_seconds=0.1, cap_seconds=5.0)
        self._log = get_log()

    async def wait(self, error: DispatcherError) -> None:
        """Logs a failure of PostgreSQL, and waits before the next try. Each wait is longer, until `end` is called."""
        seconds = self._backoff.next_wait(random.random)
        self._log.warning("store.connection_lost", reason=str(error), retry_in_seconds=round(seconds, 2))
        await asyncio.sleep(seconds)

    def end(self) -> None:
        """Notes that PostgreSQL has answered, which ends the outage. Idempotent."""
        if self._backoff.reset():
            self._log.info("store.connected")
