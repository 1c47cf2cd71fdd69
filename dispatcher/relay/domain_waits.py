"""Shortens the waits of emails for a recipient domain that may get more emails than before.

If a ceiling is reached, the worker releases the email and sets the end of its wait. `relay.timing` wakes the email at
that time. After a ceiling was raised, or attempts became at least twice as fast, this service of the leading relay
shortens the waits in proportion. After all ceilings of a domain were removed, the service ends the waits. After a
ceiling was lowered, the service does nothing: the waits end at the old times, and most of the emails must wait again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from dispatcher.domain.controls import DomainLimit
from dispatcher.store.controls import READ_SECONDS
from dispatcher.store.instants import EARLIEST
from dispatcher.store.outbox import Outbox

BATCH: Final = 1000
"""The most emails per round."""
LATE_SECONDS: Final = 60.0
"""How long the relay looks for emails that wait for a removed ceiling, because a worker may read the removal late."""
MEASURED_FACTOR: Final = 0.5
"""If attempts become shorter, the waits are shortened only by this factor or more. Their length always varies."""
SLOW_SECONDS: Final = 60.0
"""Longer attempts count after this time. Otherwise, each fast one after a slow one would shorten the waits again."""


class DomainWaits:
    """Shortens the waits of emails for recipient domains that may get more emails than before."""

    interval_seconds = READ_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._limits: Mapping[str, DomainLimit] | None = None
        # Look for emails that wait for a removed ceiling, because the previous leader may have left such emails.
        self._look_until = time.monotonic() + LATE_SECONDS
        self._slow_since: dict[str, float] = {}  # by domain: since when its attempts have taken longer
        self._factors: dict[str, float] = {}  # by domain: the factor by which to multiply the waits of its emails
        self._after = EARLIEST

    def set_limits(self, limits: Mapping[str, DomainLimit]) -> None:
        """Compares the ceilings with those of the last call, and notes for `run_once` which waits to shorten."""
        if limits or self._limits:
            self._look_until = time.monotonic() + LATE_SECONDS
        known = limits if self._limits is None else self._limits
        self._limits = {domain: self._compared(known.get(domain, limit), limit) for domain, limit in limits.items()}

    def _compared(self, before: DomainLimit, now: DomainLimit) -> DomainLimit:
        """Notes which waits to shorten. Returns the ceilings with which to compare those of the next call."""
        factor = before.pace / now.pace
        is_measured = replace(before, attempt_seconds=now.attempt_seconds) == now
        if is_measured and factor > MEASURED_FACTOR and not self._is_slow(now.domain, factor):
            return before
        self._slow_since.pop(now.domain, None)
        if factor < 1:
            self._factors[now.domain] = self._factors.get(now.domain, 1.0) * factor
        return now

    def _is_slow(self, domain: str, factor: float) -> bool:
        if factor * MEASURED_FACTOR < 1:
            self._slow_since.pop(domain, None)
            return False
        return time.monotonic() - self._slow_since.setdefault(domain, time.monotonic()) >= SLOW_SECONDS

    async def run_once(self) -> float | None:
        if not self._factors and self._limits is not None and time.monotonic() < self._look_until:
            waiting = await self._outbox.list_awaited_domains()
            self._factors = dict.fromkeys((domain for domain in waiting if domain not in self._limits), 0.0)
        if not self._factors:
            return None
        domain, factor = next(iter(self._factors.items()))
        if self._after == EARLIEST:
            await self._outbox.shorten_group_waits(domain, factor)
        count, self._after = await self._outbox.shorten_waits(domain, factor, self._after, BATCH)
        if count < BATCH:
            del self._factors[domain]
            self._after = EARLIEST
        return 0.0 if self._factors else None
