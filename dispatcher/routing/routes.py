"""The providers in the operator's order, and which of them gets the next attempt.

Only a provider that can carry the email is tried. The next one is tried only where the one before gave a definite no
that concerns itself (see `domain.outcome.CONCERNS_PROVIDER`) or found that it cannot carry the email, never after
silence.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import (
    CONCERNS_PROVIDER,
    Accepted,
    Concern,
    Deferred,
    Outcome,
    Reason,
    Rejected,
    Uncertain,
)
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.capabilities import Uncarried, uncarried
from dispatcher.providers.contract import Provider
from dispatcher.routing.breaker import FAILURES_IN_A_ROW, LONGEST_OPEN_SECONDS, UNREACHED_IN_A_ROW, Breaker, State
from dispatcher.routing.evidence import Blame
from dispatcher.routing.rate import RateLimit
from dispatcher.telemetry import metrics

SHORTEST_AWAY_SECONDS: Final = 1.0
"""An email whose provider is being probed stays away so long: the probe has an answer by then, or nearly."""
AWAY_SPREAD: Final = 0.5
"""So much is added at most, by chance: emails that wait for one provider come back one after another, not at once."""


@dataclass(slots=True)
class Route:
    """One provider, with what decides whether and how fast it is used.

    Attributes:
        limit: None where the operator set no ceiling.
        name: The provider's.
        capabilities: The provider's.
    """

    provider: Provider
    breaker: Breaker
    limit: RateLimit | None = None
    name: str = field(init=False)
    capabilities: Capabilities = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.provider.name
        self.capabilities = self.provider.capabilities

    @property
    def is_closed(self) -> bool:
        """Whether it is used as if nothing were wrong."""
        return self.breaker.state is State.CLOSED

    @property
    def may_be_tried(self) -> bool:
        """Whether an email may be tried on it now."""
        return self.breaker.room != 0

    def may_take(self, email: OutgoingEmail) -> bool:
        """Whether this email may be tried on it now."""
        return self.breaker.admits(email)

    def note(self, outcome: Outcome, trial: int, email: OutgoingEmail, *, is_told_already: bool = False) -> Blame:
        """Learns from what the provider said, or did not say, about an email; returns what a refusal is blamed on.

        Args:
            trial: Its number, as `breaker.begin` gave it.
            is_told_already: It shared a call with an email that was noted: what that says of the provider counts once.
                Silence counts for each all the same, because it bounds how many emails are held.
        """
        match outcome:
            case Accepted():
                self.breaker.succeed(trial)
            case Uncertain():
                # Silence is no answer: a provider that gives none to anybody would have the whole queue held.
                self.breaker.miss(trial, outcome.reason)
            case Deferred() if outcome.concern is not Concern.EMAIL:
                return self._note_refusal(outcome, trial, email, is_told_already=is_told_already)
            case Deferred(code=None) | Rejected(code=None):
                # Our own word: the adapter refused the content, or failed. The provider may not even have been asked.
                self.breaker.give_up(trial)
            case Deferred() | Rejected():
                self.breaker.succeed(trial)
            case _:
                assert_never(outcome)
        return Blame.EMAIL

    def _note_refusal(self, refusal: Deferred, trial: int, email: OutgoingEmail, *, is_told_already: bool) -> Blame:
        """Learns from a refusal that may be about the provider as a whole."""
        is_throttled = refusal.reason is Reason.THROTTLED
        witness = None if refusal.concern is Concern.PROVIDER else email
        if is_told_already:
            self.breaker.give_up(trial)
            blame = Blame.PROVIDER if not self.is_closed else Blame.UNKNOWN if is_throttled else Blame.EMAIL
        elif is_throttled or _is_away_for_long(refusal):
            blame = self.breaker.pause(trial, refusal.retry_after, refusal.reason, witness)
        else:
            is_unreached = refusal.reason is Reason.CONNECTION_FAILED and witness is None
            blame = self.breaker.fail(
                trial,
                refusal.reason,
                witness,
                in_a_row=UNREACHED_IN_A_ROW if is_unreached else FAILURES_IN_A_ROW,
                by_recipient=refusal.reason is Reason.RECIPIENT_DEFERRED,
            )
        if is_throttled:
            metrics.THROTTLES.add(1, self.name)
            if self.limit and blame is Blame.PROVIDER:
                self.limit.slow_down()
        return blame

    def note_fault(self, fault: ProviderFault, trial: int, email: OutgoingEmail) -> Blame:
        """Learns that the provider says it cannot be used; returns what that is blamed on."""
        return self.breaker.open(trial, fault.message, email)


class Routes:
    """All routes of one worker, in order."""

    def __init__(self, routes: Sequence[Route], *, jitter: Callable[[], float] = random.random) -> None:
        """
        Args:
            jitter: From 0 up to 1; spreads the emails that wait for one provider.
        """
        self._routes = tuple(routes)
        self._jitter = jitter

    @property
    def first_name(self) -> str:
        """The name of the first provider in order."""
        return self._routes[0].name

    def choose(self, email: OutgoingEmail, left_out: Collection[str] = ()) -> Route | None:
        """The first route that can carry the email and may be tried now; None if there is none.

        Args:
            left_out: Providers that have just refused this email, or have found that they cannot carry it.
        """
        for route in self._routes:
            if route.name not in left_out and route.may_take(email) and route.capabilities.lacks(email) is None:
                return route
        return None

    @property
    def copies(self) -> int:
        """How many times the size of its attachments an email may need of memory, with the provider that takes most."""
        return max(route.capabilities.copies for route in self._routes)

    def uncarried(self, email: OutgoingEmail) -> Uncarried | None:
        """Why no provider could ever carry the email; None if one could."""
        return uncarried(email, {route.name: route.capabilities for route in self._routes})

    def able(self, email: OutgoingEmail, unable: Collection[str] = ()) -> list[Route]:
        """The routes that could carry the email, now or later.

        Args:
            unable: Providers that have found that they cannot.
        """
        return [route for route in self._routes if route.name not in unable and route.capabilities.lacks(email) is None]

    def away_seconds(self, able: Sequence[Route]) -> float:
        """How long an email stays out of the queue if none of the routes that could carry it may be tried now.

        0 if those are all routes: nothing is leased until one of them may be tried. Otherwise other emails go on over
        the other routes, and this one would be leased and given back all the time.
        """
        if len(able) == len(self._routes):
            return 0.0
        wait_seconds = min((route.breaker.wait_seconds for route in able), default=0.0)
        bounded = min(max(wait_seconds, SHORTEST_AWAY_SECONDS), LONGEST_OPEN_SECONDS)
        return bounded * (1 + AWAY_SPREAD * self._jitter())

    @staticmethod
    def doubt_seconds(able: Sequence[Route], email: OutgoingEmail) -> float:
        """How long an email is to wait here, because it may be what one of these routes refuses."""
        return max((route.breaker.doubt_seconds(email) for route in able), default=0.0)

    @property
    def is_probing(self) -> bool:
        """Whether no provider may be tried but by a probe."""
        return self.room == 1

    @property
    def room(self) -> int | None:
        """How many emails may be under lease; None for no bound, 1 for a probe, 0 while nobody can be tried."""
        rooms = [route.breaker.room for route in self._routes]
        return None if None in rooms else max(room for room in rooms if room is not None)

    @property
    def wait_seconds(self) -> float:
        """How long until some route may be tried; 0 if one may be now."""
        return min(route.breaker.wait_seconds for route in self._routes)

    @property
    def change_seconds(self) -> float | None:
        """How long until the next route that may not be tried now may be; None if there is none."""
        return min((seconds for route in self._routes if (seconds := route.breaker.wait_seconds)), default=None)

    def window(self, most: int, seconds: float) -> int:
        """How many emails are worth holding: no more than the ceilings let through in so many seconds, at least one.

        What a worker holds beyond that would only wait: for tokens, its lease renewed again and again, and RabbitMQ
        closes a channel that holds a delivery for half an hour.
        """
        ceilings = [route.limit.ceiling for route in self._routes if route.limit]
        return most if len(ceilings) < len(self._routes) else max(1, min(most, math.ceil(sum(ceilings) * seconds)))

    async def close(self) -> None:
        """Closes every provider's idle connections."""
        for route in self._routes:
            await route.provider.close()


def _is_away_for_long(outcome: Deferred) -> bool:
    """Whether it says when the provider will be back, and that is later than we would try by ourselves."""
    return outcome.reason in CONCERNS_PROVIDER and (outcome.retry_after or 0.0) > LONGEST_OPEN_SECONDS
