"""The providers in the operator's order, and which of them gets the next attempt.

The next one is tried only where the one before gave a definite no that concerns itself (see
`domain.outcome.CONCERNS_PROVIDER`), never after silence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dispatcher.domain.outcome import CONCERNS_PROVIDER, Deferred, Outcome, Reason
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Provider
from dispatcher.routing.breaker import Breaker, State
from dispatcher.routing.rate import RateLimit


@dataclass(slots=True)
class Route:
    """One provider, with what decides whether and how fast it is used.

    Attributes:
        limit: None where the operator set no ceiling.
    """

    provider: Provider
    breaker: Breaker
    limit: RateLimit | None = None

    @property
    def name(self) -> str:
        """The provider's name."""
        return self.provider.name

    @property
    def is_closed(self) -> bool:
        """Whether it is used as if nothing were wrong."""
        return self.breaker.state is State.CLOSED

    async def note(self, outcome: Outcome) -> None:
        """Learns from what the provider said, or did not say, about an email."""
        if not isinstance(outcome, Deferred) or outcome.reason not in CONCERNS_PROVIDER:
            self.breaker.succeed()
        elif outcome.reason is Reason.THROTTLED:
            self.breaker.pause(outcome.retry_after, outcome.reason)
            if self.limit:
                await self.limit.slow_down()
        else:
            self.breaker.fail(outcome.reason)

    def note_fault(self, fault: ProviderFault) -> None:
        """Learns that the provider cannot be used as a whole."""
        self.breaker.open(fault.message)


class Routes:
    """All routes of one worker, in order."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = tuple(routes)

    @property
    def first_name(self) -> str:
        """The name of the first provider in order."""
        return self._routes[0].name

    def choose(self, refused_by: Collection[str] = ()) -> Route | None:
        """The first route that may be tried now, those left out that have just refused this email; None if none may."""
        for route in self._routes:
            if route.name not in refused_by and route.breaker.room != 0:
                return route
        return None

    @property
    def room(self) -> int | None:
        """How many emails may be under lease; None for no bound, 1 for a probe, 0 while nobody can be tried."""
        rooms = [route.breaker.room for route in self._routes]
        return None if None in rooms else max(room for room in rooms if room is not None)

    @property
    def wait_seconds(self) -> float:
        """How long until some route may be tried; 0 if one may be now."""
        return min(route.breaker.wait_seconds for route in self._routes)

    async def close(self) -> None:
        """Closes every provider's idle connections."""
        for route in self._routes:
            await route.provider.close()
