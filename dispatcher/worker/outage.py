"""PostgreSQL away: what a worker wants written waits here, and is tried again."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from dispatcher.domain.backoff import Backoff
from dispatcher.errors import StoreUnavailable
from dispatcher.telemetry.log import get_log

LOCKED_SECONDS: Final = 0.5
"""Until the next look at an email that another transaction has locked."""


class StoreOutage:
    """The worker's one view of whether PostgreSQL answers.

    Attributes:
        committing: To be entered while a commit is tried, however often.
    """

    def __init__(self, committing: AbstractContextManager[None] | None = None) -> None:
        self.committing = committing or nullcontext()
        self._backoff = Backoff(base_seconds=0.1, cap_seconds=5.0)
        self._log = get_log()

    async def wait(self, error: StoreUnavailable) -> None:
        """Notes a failure, and returns when it is time to try again."""
        seconds = self._backoff.next_wait(random.random)
        self._log.warning("store.connection_lost", reason=str(error), retry_in_seconds=round(seconds, 2))
        await asyncio.sleep(seconds)

    def over(self) -> None:
        """Notes that PostgreSQL answered."""
        if self._backoff.worked():
            self._log.info("store.connected")
