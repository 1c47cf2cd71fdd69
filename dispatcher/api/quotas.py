"""Daily quotas of recipients, shared by all processes of the API.

They are counted in the database, and taken from it in small chunks, so that a request mostly costs no statement. A
quota is never exceeded; a process that was killed takes what is left of its chunk (a fiftieth of the quota at most)
with it, and what others hold at the end of a day's quota is refused a little early.

Which day it is, and how long it lasts, the database says: this host's calendar is never asked.
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

MOST_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class Taken:
    """Recipients that a request took.

    Attributes:
        key: Of whose quota; None where there is none.
        day: Of which day.
    """

    key: ApiKey | None
    day: date = date.min


@dataclass(frozen=True, slots=True)
class UsedUp:
    """So many recipients are not left of a key's quota.

    Attributes:
        retry_after: Seconds until a new day begins.
    """

    retry_after: int


@dataclass(slots=True)
class _Purse:
    """What this process holds of a key's quota.

    Attributes:
        day: Of which day, as the database said.
        day_until: When that day ends at the earliest, by our clock.
        failed_at: When the database was asked in vain the last time.
    """

    day: date = date.min
    day_until: float = -math.inf
    left: int = 0
    filling: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed_at: float = -math.inf


class Quotas:
    """What each key may still send today."""

    def __init__(self, store: KeyStore, clock: Callable[[], float] = steady_clock) -> None:
        """
        Args:
            clock: Seconds of a steady clock.
        """
        self._store = store
        self._clock = clock
        self._purses: dict[str, _Purse] = {}

    async def take(self, key: ApiKey | None, recipients: int) -> Taken | UsedUp:
        """Takes so many recipients of a key's quota, all or none.

        Raises:
            StoreUnavailable: the database does not say, such as StoreBusy while somebody has locked the key's count.
        """
        if key is None or key.recipients_per_day is None:
            return Taken(None)
        purse = self._purses.setdefault(key.key_id, _Purse())
        if self._spend(purse, recipients) or await self._fill_and_spend(purse, key, recipients):
            return Taken(key, purse.day)
        return UsedUp(max(1, math.ceil(purse.day_until - self._clock())))

    async def give_back(self, taken: Taken, recipients: int) -> None:
        """Takes back what was not used: up to a chunk of it stays here, the rest is for others. Void after its day."""
        if taken.key is None or not recipients:
            return
        purse = self._purses[taken.key.key_id]
        if purse.day != taken.day:
            return
        purse.left += recipients
        if (surplus := purse.left - _chunk_of(taken.key)) > 0:
            purse.left -= surplus
            try:
                await self._store.return_recipients(taken.key.key_id, taken.day, surplus)
            except StoreBusy:
                purse.left += surplus if purse.day == taken.day else 0
            except StoreUnavailable:
                pass  # It may have arrived, and then others have it: a quota is never exceeded.

    async def close(self) -> None:
        """Gives everything back that this process holds."""
        for key_id, purse in self._purses.items():
            if purse.left > 0:
                try:
                    await self._store.return_recipients(key_id, purse.day, purse.left)
                except StoreUnavailable:
                    return
                purse.left = 0

    def _spend(self, purse: _Purse, recipients: int) -> bool:
        if self._clock() >= purse.day_until or purse.left < recipients:
            return False
        purse.left -= recipients
        return True

    async def _fill_and_spend(self, purse: _Purse, key: ApiKey, recipients: int) -> bool:
        called_at = self._clock()
        async with purse.filling:
            while not self._spend(purse, recipients):
                if purse.failed_at >= called_at:
                    # Who waited together fails together: one after the other, each would wait as long again.
                    raise StoreBusy("The key's quota could not be asked for.")
                try:
                    if not await self._fill(purse, key, recipients):
                        return False
                except StoreUnavailable:
                    purse.failed_at = self._clock()
                    raise
                # Where a day ended meanwhile, and what was in the purse with it, it may take another round.
        return True

    async def _fill(self, purse: _Purse, key: ApiKey, recipients: int) -> bool:
        """Takes what the purse lacks, or a chunk if that is more; whether there was so much."""
        asked_at = self._clock()
        # Set aside: whatever others spent of it meanwhile would be lacking.
        held, purse.left = purse.left if asked_at < purse.day_until else 0, 0
        needed = recipients - held
        quota, wanted = key.recipients_per_day or 0, max(needed, _chunk_of(key))
        try:
            grant = await self._store.take_recipients(key.key_id, needed=needed, wanted=wanted, quota=quota)
        finally:
            purse.left += held
        if grant.day != purse.day:
            purse.day, purse.left = grant.day, 0
        purse.left += grant.recipients
        purse.day_until = asked_at + grant.seconds_left
        return grant.recipients > 0


def _chunk_of(key: ApiKey) -> int:
    """How many recipients a process takes ahead."""
    return min(MOST_AT_ONCE, (key.recipients_per_day or 0) // 50)
