"""Ends the emails and SMS of test keys as their addresses ask, and sends nothing.

    bounced@simulator.invalid ─▶ sent ─▶ the event of a hard bounce, stored as a provider's events are
    held@simulator.invalid ─▶ held
    any other address ─▶ sent, without events

The events suppress no recipient, so a test can use an address again. They are not retried after a crash of the worker.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.outcome import Accepted, Outcome, Uncertain
from dispatcher.domain.outgoing import TEST_CHANNEL, OutgoingEmail
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.errors import DispatcherError
from dispatcher.host.clock import steady_clock
from dispatcher.providers.contract import Attempt
from dispatcher.routing.breaker import CircuitBreaker
from dispatcher.routing.routes import Route
from dispatcher.store.address_hashes import normalised
from dispatcher.store.connections import Pool
from dispatcher.telemetry.log import get_log

NAME: Final = "simulator"
DOMAIN: Final = "simulator.invalid"
"""No server can have a name that ends in .invalid (RFC 2606)."""
STORE_TRIES: Final = 6
SUPPRESSES_NOBODY: Final = SuppressionRules(reasons=frozenset(), soft_bounces=0)
_EVENTS: Final[Mapping[str, Sequence[tuple[EventKind, Bounce | None]]]] = {
    "delivered": [(EventKind.DELIVERED, None)],
    "bounced": [(EventKind.BOUNCED, Bounce.HARD)],
    "complained": [(EventKind.DELIVERED, None), (EventKind.COMPLAINED, None)],
    "deferred": [(EventKind.DEFERRED, None), (EventKind.DELIVERED, None)],
}
_HELD: Final = "held"
_MILLISECOND: Final = timedelta(milliseconds=1)

Report = Callable[[Sequence[ProviderEvent]], Awaitable[object]]


class Simulator:
    """The only provider of the channel `test`; see `contract.Provider`."""

    name = NAME
    capabilities = Capabilities(copies=1, channel=TEST_CHANNEL, templates=True, delivers=False)

    def __init__(self, report: Report) -> None:
        self._report = report
        self._reports: set[asyncio.Task[None]] = set()

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        attempt.mark_on_wire()
        asked = [(each, _asked_by(each)) for each in (*email.to, *email.cc, *email.bcc)]
        if any(word == _HELD for _, word in asked):
            return Uncertain("Simulated: no answer.")
        now = datetime.now(UTC)
        events = [
            ProviderEvent(
                email_id=email.email_id,
                provider=NAME,
                kind=kind,
                bounce=bounce,
                happened_at=now + number * _MILLISECOND,
                recipient=recipient,
                code="5.1.1" if bounce else None,
                detail="simulated",
            )
            for recipient, word in asked
            for number, (kind, bounce) in enumerate(_EVENTS.get(word, ()))
        ]
        if events:
            task = asyncio.create_task(self._store(events))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)
        return Accepted(f"test-{email.email_id}", "simulated")

    async def _store(self, events: Sequence[ProviderEvent]) -> None:
        for number in range(STORE_TRIES):
            wait = 2.0**number / 10
            try:
                await self._report(events)
            except DispatcherError as error:
                get_log().warning(
                    "events.source_unavailable", provider=NAME, reason=error.message, retry_in_seconds=wait
                )
                await asyncio.sleep(wait)
            else:
                return

    async def close(self) -> None:
        await asyncio.gather(*self._reports, return_exceptions=True)


def simulator_route(pool: Pool) -> Route:
    """The route of the simulator. It is never paused or broken."""

    async def report(events: Sequence[ProviderEvent]) -> None:
        from dispatcher.events.intake import EventIntake  # imported here, because few workers see a test

        await EventIntake(pool, SUPPRESSES_NOBODY).store(events)

    return Route(Simulator(report), CircuitBreaker(steady_clock, lambda *_: None, window=sys.maxsize))


def _asked_by(recipient: str) -> str:
    """The word of a simulated address: `bounced` of `bounced+17@simulator.invalid`; empty for any other recipient."""
    local, _, domain = normalised(recipient).rpartition("@")
    return local.partition("+")[0] if domain == DOMAIN else ""
