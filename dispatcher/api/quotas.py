"""Daily quotas of recipients, shared by all processes of the API.

They are counted in the database, and taken from it in small chunks, so that a request mostly costs no statement. A
quota is never exceeded; a process that was killed takes what is left of its chunk (a fiftieth of the quota at most)
with it, and what others hold at the end of a day's quota is refused a little early.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Final

from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.store.api_keys import ApiKey, KeyStore

MOST_AT_ONCE: Final = 500


@dataclass(slots=True)
class _Purse:
    """What this process holds of a key's quota.

    Attributes:
        failed_at: When the database was asked in vain the last time.
    """

    day: date = date.min
    left: int = 0
    filling: asyncio.Lock = field(default_factory=asyncio.Lock)
    failed_at: float = -math.inf


class Quotas:
    """What each key may still send today."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._purses: dict[str, _Purse] = {}

    async def take(self, key: ApiKey | None, recipients: int) -> bool:
        """Takes so many recipients of a key's quota, all or none; whether there were so many.

        Raises:
            StoreUnavailable: the database does not say, such as StoreBusy while somebody has locked the key's count.
        """
        if key is None or key.recipients_per_day is None:
            return True
        purse = self._purses.setdefault(key.key_id, _Purse())
        if self._spend(purse, recipients):
            return True
        called_at = time.monotonic()
        async with purse.filling:
            if self._spend(purse, recipients):
                return True
            if purse.failed_at >= called_at:
                # Who waited together fails together: one after the other, each would wait as long again.
                raise StoreBusy("The key's quota could not be asked for.")
            try:
                await self._fill(purse, key, recipients)
            except StoreUnavailable:
                purse.failed_at = time.monotonic()
                raise
            return self._spend(purse, recipients)

    def give_back(self, key: ApiKey | None, recipients: int) -> None:
        """What was taken was not used."""
        if key is not None and key.recipients_per_day is not None and recipients:
            self._purses[key.key_id].left += recipients

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
        if purse.day != datetime.now(UTC).date() or purse.left < recipients:
            return False
        purse.left -= recipients
        return True

    async def _fill(self, purse: _Purse, key: ApiKey, recipients: int) -> None:
        quota = key.recipients_per_day or 0
        held = purse.left if purse.day == datetime.now(UTC).date() else 0
        wanted = max(recipients - held, min(MOST_AT_ONCE, quota // 50))
        day, granted = await self._store.take_recipients(key.key_id, wanted=wanted, quota=quota)
        purse.left = granted + (purse.left if purse.day == day else 0)
        purse.day = day


def seconds_until_tomorrow() -> int:
    """When a new day (UTC) begins."""
    now = datetime.now(UTC)
    tomorrow = datetime.combine(now.date() + timedelta(days=1), datetime.min.time(), UTC)
    return int((tomorrow - now).total_seconds()) + 1
