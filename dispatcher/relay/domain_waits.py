"""Shortens the waits of emails for a recipient domain, after an operator raised or removed the domain's ceiling.

If a ceiling is reached, the worker releases the email and sets the end of its wait. `relay.timing` wakes the email at
that time. After a ceiling was raised, this service of the leading relay shortens the waits in proportion. After all
ceilings of a domain were removed, the service ends the waits. After a ceiling was lowered, the service does nothing:
the waits end at the old times, and most of the emails must wait again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from dispatcher.domain.controls import DomainLimit
from dispatcher.store.outbox import THE_START, Outbox

BATCH: Final = 1000
"""The most emails per round."""
INTERVAL_SECONDS: Final = 0.5
LATE_SECONDS: Final = 60.0
"""How long the relay looks for emails that wait for a removed ceiling, because a worker may read the removal late."""


class DomainWaits:
    """Shortens the waits of emails for recipient domains whose ceilings were raised or removed."""

    interval_seconds = INTERVAL_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._limits: Mapping[str, DomainLimit] | None = None
        # Look for emails that wait for a removed ceiling, because the previous leader may have left such emails.
        self._look_until = time.monotonic() + LATE_SECONDS
        self._factors: dict[str, float] = {}  # by domain: the factor by which to multiply the waits of its emails
        self._after = THE_START

    def set_limits(self, limits: Mapping[str, DomainLimit]) -> None:
        """Compares the ceilings with those of the last call, and notes for `run_once` which waits to shorten."""
        before = limits if self._limits is None else self._limits
        self._limits = limits
        if limits or before:
            self._look_until = time.monotonic() + LATE_SECONDS
        for domain in limits.keys() & before.keys():
            if (factor := wait_factor(before[domain], limits[domain])) < 1:
                self._factors[domain] = self._factors.get(domain, 1.0) * factor

    async def run_once(self) -> float:
        """Shortens the waits of a batch of emails. Returns the seconds until the next round."""
        if not self._factors and self._limits is not None and time.monotonic() < self._look_until:
            waiting = await self._outbox.list_awaited_domains()
            self._factors = dict.fromkeys((domain for domain in waiting if domain not in self._limits), 0.0)
        if not self._factors:
            return INTERVAL_SECONDS
        domain, factor = next(iter(self._factors.items()))
        if self._after == THE_START:
            await self._outbox.shorten_group_waits(domain, factor)
        count, self._after = await self._outbox.shorten_waits(domain, factor, self._after, BATCH)
        if count < BATCH:
            del self._factors[domain]
            self._after = THE_START
        return 0.0 if self._factors else INTERVAL_SECONDS


def wait_factor(before: DomainLimit, now: DomainLimit) -> float:
    """The factor by which a change of a domain's ceilings multiplies the waits.

    For example, 0.5 if the ceiling was doubled, 1 if no ceiling was raised, and 0 if all ceilings were removed.
    """
    rates = _factor(before.per_second, now.per_second)
    slots = _factor(before.concurrent, now.concurrent)
    factors = [factor for factor in (rates, slots) if factor is not None]
    return min(1.0, max(factors, default=0.0))


def _factor(before: float | None, now: float | None) -> float | None:
    """The factor by which the change of one ceiling multiplies the waits; None if there is no such ceiling now."""
    if now is None:
        return None
    return 1.0 if before is None else before / now
