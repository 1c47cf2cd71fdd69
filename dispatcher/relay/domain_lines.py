"""Lets emails come earlier that wait for the ceiling of a recipient domain, after an operator raised or removed it.

Workers put an email aside until its place in the line, and `relay.timing` wakes it then. A lower ceiling needs nothing:
the emails come at their times, and most of them get new places. After a higher ceiling, the waits are shortened in
proportion. After the removal, all emails that wait for the domain become due. A service of the leading relay.
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
"""For so long after the last ceiling was removed, the relay looks for emails that workers put aside meanwhile."""


class DomainLines:
    """The lines of emails that wait for ceilings of recipient domains."""

    interval_seconds = INTERVAL_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._limits: Mapping[str, DomainLimit] | None = None
        self._look_until = time.monotonic() + LATE_SECONDS  # an earlier leader may not have finished
        self._moves: dict[str, float] = {}  # the factor for the waits of a domain's emails
        self._after = THE_START

    def set_limits(self, limits: Mapping[str, DomainLimit]) -> None:
        """Notes what operators set."""
        before = limits if self._limits is None else self._limits
        self._limits = limits
        if limits or before:
            self._look_until = time.monotonic() + LATE_SECONDS
        for domain in limits.keys() & before.keys():
            if (factor := part_left(before[domain], limits[domain])) < 1:
                self._moves[domain] = self._moves.get(domain, 1.0) * factor

    async def run_once(self) -> float:
        """Moves a batch of emails. Returns the seconds until the next round."""
        if not self._moves and self._limits is not None and time.monotonic() < self._look_until:
            waiting = await self._outbox.list_domains_in_line()
            self._moves = dict.fromkeys((domain for domain in waiting if domain not in self._limits), 0.0)
        if not self._moves:
            return INTERVAL_SECONDS
        domain, factor = next(iter(self._moves.items()))
        if self._after == THE_START:
            await self._outbox.shorten_lines(domain, factor)
        moved, self._after = await self._outbox.move_up(domain, factor, self._after, BATCH)
        if moved < BATCH:
            del self._moves[domain]
            self._after = THE_START
        return 0.0 if self._moves else INTERVAL_SECONDS


def part_left(before: DomainLimit, now: DomainLimit) -> float:
    """The part of a wait that is left after a change of a domain's ceilings, from 0 to 1; 1 if none was raised."""
    rates = _part(before.per_second, now.per_second)
    slots = _part(before.concurrent, now.concurrent)
    parts = [part for part in (rates, slots) if part is not None]
    return min(1.0, max(parts, default=0.0))


def _part(before: float | None, now: float | None) -> float | None:
    """How much shorter a wait for one ceiling becomes; None if there is no such ceiling any more."""
    if now is None:
        return None
    return 1.0 if before is None else before / now
