"""Daily quotas of recipients per API key, shared by all API processes.

The database counts each key's recipients per day. A process reserves recipients in chunks of a fiftieth of the quota,
at most 500, so most requests need no SQL statement. A quota is never exceeded. But a request can be refused although
some of the quota is unused: it may be in other processes' chunks, or in the chunk of a process that was killed.

The database's clock determines which day it is and when the day ends. The host's clock is not used.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import Final

from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.host.clock import steady_clock
from dispatcher.store.api_keys import ApiKey, KeyStore

MAX_CHUNK: Final = 500


@dataclass(frozen=True, slots=True)
class Reservation:
    """Recipients that a request has reserved from a key's quota (None: the key has no quota) of a day."""

    key: ApiKey | None
    day: date = date.min


@dataclass(frozen=True, slots=True)
class QuotaExhausted:
    """The key's quota for today has too few recipients left."""

    retry_after: int
    """Seconds until the next day begins."""


@dataclass(slots=True)
class _Chunk:
    """This process's chunk of a key's quota: recipients that the process has reserved in advance."""

    day: date = date.min  # by the database's clock
    day_ends_at: float = -math.inf  # the earliest possible end, on this process's monotonic clock
    remaining: int = 0
    left_in_database: int = 0  # when the chunk was last filled
    refill_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed_at: float = -math.inf


class Quotas:
    """Reserves recipients from the daily quotas of keys."""

    def __init__(self, store: KeyStore, clock: Callable[[], float] = steady_clock) -> None:
        self._store = store
        self._clock = clock
        self._chunks: dict[str, _Chunk] = {}

    async def reserve(self, key: ApiKey | None, recipients: int) -> Reservation | QuotaExhausted:
        """Reserves recipients from a key's quota for one request.

        If the quota has too few recipients left, reserves none, and returns `QuotaExhausted`.
        """
        if key is None or key.recipients_per_day is None:
            return Reservation(None)
        chunk = self._chunks.setdefault(key.key_id, _Chunk())
        if self._spend(chunk, recipients) or await self._refill_and_spend(chunk, key, recipients):
            return Reservation(key, chunk.day)
        return QuotaExhausted(max(1, math.ceil(chunk.day_ends_at - self._clock())))

    def left(self, key: ApiKey) -> tuple[int, int, int] | None:
        """The key's quota, how many recipients are left of it, and the seconds until the next day; None if this process
        does not know, because it has reserved none today. What other processes have reserved since is not known."""
        chunk, now = self._chunks.get(key.key_id), self._clock()
        if chunk is None or key.recipients_per_day is None or now >= chunk.day_ends_at:
            return None
        return key.recipients_per_day, chunk.remaining + chunk.left_in_database, math.ceil(chunk.day_ends_at - now)

    async def return_unused(self, reservation: Reservation, recipients: int) -> None:
        """Gives back recipients that were reserved but not used, so that later requests can use them.

        Adds them to this process's chunk: the recipients that it has reserved in advance. If the chunk becomes too
        large, the surplus returns to the database. Has no effect if the day of the reservation is over.
        """
        if reservation.key is None or not recipients:
            return
        chunk = self._chunks[reservation.key.key_id]
        if chunk.day != reservation.day:
            return
        chunk.remaining += recipients
        if (surplus := chunk.remaining - _chunk_size(reservation.key)) > 0:
            chunk.remaining -= surplus
            try:
                await self._store.return_recipients(reservation.key.key_id, reservation.day, surplus)
                chunk.left_in_database += surplus if chunk.day == reservation.day else 0
            except StoreBusy:
                chunk.remaining += surplus if chunk.day == reservation.day else 0
            except StoreUnavailable:
                # Do not keep the surplus. The statement may have succeeded, although its answer was lost: the surplus
                # would then be both here and in the database, and the quota could be exceeded.
                pass

    async def close(self) -> None:
        """Returns to the database all recipients that this process has reserved in advance and not used."""
        for key_id, chunk in self._chunks.items():
            if chunk.remaining > 0:
                try:
                    await self._store.return_recipients(key_id, chunk.day, chunk.remaining)
                except StoreUnavailable:
                    return
                chunk.remaining = 0

    def _spend(self, chunk: _Chunk, recipients: int) -> bool:
        if self._clock() >= chunk.day_ends_at or chunk.remaining < recipients:
            return False
        chunk.remaining -= recipients
        return True

    async def _refill_and_spend(self, chunk: _Chunk, key: ApiKey, recipients: int) -> bool:
        called_at = self._clock()
        async with chunk.refill_lock:
            while not self._spend(chunk, recipients):
                if chunk.failed_at >= called_at:
                    # The refill failed while this call waited. If every waiting call retried, the calls would time out
                    # one after the other.
                    raise StoreBusy("The API key's quota could not be read.")
                try:
                    if not await self._refill(chunk, key, recipients):
                        return False
                except StoreUnavailable:
                    chunk.failed_at = self._clock()
                    raise
                # Check again: if the day ended during the refill, the chunk is void, and another refill is needed.
        return True

    async def _refill(self, chunk: _Chunk, key: ApiKey, recipients: int) -> bool:
        """Takes recipients from the quota in the database, and adds them to this process's chunk.

        Takes a whole new chunk, or more if this request needs more. Returns False if the quota has too few recipients
        left for this request.
        """
        asked_at = self._clock()
        # Take this process's chunk out of use while the statement runs. Otherwise, concurrent requests could use up the
        # chunk, and the refill would be too small for this request.
        set_aside, chunk.remaining = chunk.remaining if asked_at < chunk.day_ends_at else 0, 0
        needed = recipients - set_aside
        quota, wanted = key.recipients_per_day or 0, max(needed, _chunk_size(key))
        try:
            grant = await self._store.take_recipients(key.key_id, needed=needed, wanted=wanted, quota=quota)
        finally:
            chunk.remaining += set_aside
        if grant.day != chunk.day:
            chunk.day, chunk.remaining = grant.day, 0
        chunk.remaining += grant.recipients
        chunk.left_in_database = grant.left
        chunk.day_ends_at = asked_at + grant.seconds_left
        return grant.recipients > 0


def _chunk_size(key: ApiKey) -> int:
    """How many recipients a process reserves at a time, unless one request needs more."""
    return min(MAX_CHUNK, (key.recipients_per_day or 0) // 50)
