"""The providers in the operator's order, and the choice of the provider for the next attempt.

A provider is tried only if it can send the email. The next provider is tried only after a definite refusal that
concerns the previous provider (see `domain.outcome.CONCERNS_PROVIDER`), or if the previous provider's adapter found
that its provider cannot send the email. After a missing answer, the email never goes to a different provider (see
`domain.outcome`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Final, assert_never

from dispatcher.config.plugins import renamed
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import (
    CONCERNS_PROVIDER,
    Accepted,
    AccountFault,
    Concern,
    Deferred,
    Outcome,
    Reason,
    Rejected,
    Uncertain,
)
from dispatcher.domain.outgoing import TEST_CHANNEL, OutgoingEmail
from dispatcher.domain.provider_text import SENDER
from dispatcher.domain.turns import LaneWeights
from dispatcher.domain.values import dataclass, field
from dispatcher.errors import ProviderFault
from dispatcher.providers.capabilities import CapabilityGap, capability_gap
from dispatcher.providers.contract import Provider
from dispatcher.routing.breaker import (
    FAILURES_IN_A_ROW,
    LONGEST_OPEN_SECONDS,
    UNREACHED_IN_A_ROW,
    BreakerState,
    CircuitBreaker,
)
from dispatcher.routing.domain_gates import DomainGates
from dispatcher.routing.evidence import Blame
from dispatcher.routing.gate import Gate
from dispatcher.routing.rate import RateLimit
from dispatcher.telemetry import metrics

MIN_DELAY_SECONDS: Final = 1.0
"""If an email's provider is being probed, the email is due again after at least this time. The probe usually gets its
answer sooner."""
DELAY_SPREAD: Final = 0.5
"""An email's delay is up to 50 % longer, at random. So emails that wait for one provider become due one after
another."""

_UNKNOWN: Final = AccountFault("Ask the provider why it refuses these emails.", in_a_row=FAILURES_IN_A_ROW)


@dataclass(slots=True)
class Route:
    """One provider, with its breaker, its rate limit (None without a ceiling) and its gate (None without a limit)."""

    provider: Provider
    breaker: CircuitBreaker
    limit: RateLimit | None = None
    gate: Gate | None = None
    is_paused: bool = False
    name: str = field(init=False)
    capabilities: Capabilities = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.provider.name
        self.capabilities = self.provider.capabilities

    @property
    def is_closed(self) -> bool:
        return self.breaker.state is BreakerState.CLOSED

    @property
    def may_be_tried(self) -> bool:
        return self.room != 0

    @property
    def room(self) -> int | None:
        """How many emails may be tried now; None for no limit."""
        return 0 if self.is_paused else self.breaker.room

    @property
    def wait_seconds(self) -> float:
        """Seconds until the provider may be tried; 0 if now, infinite while an operator pauses the provider."""
        return math.inf if self.is_paused else self.breaker.wait_seconds

    def may_take(self, email: OutgoingEmail) -> bool:
        return not self.is_paused and self.breaker.admits(email)

    def record_outcome(
        self, outcome: Outcome, trial: int, email: OutgoingEmail, *, is_already_counted: bool = False
    ) -> Blame:
        """Updates the breaker with an outcome. Returns whether the email or the provider caused a refusal.

        If `is_already_counted`, another email of the same bulk call has reported the provider's failure, which counts
        once. A missing answer still counts for each email, to limit how many emails become held.
        """
        match outcome:
            case Accepted():
                self.breaker.succeed(trial)
            case Uncertain():
                # The provider did not answer. If the breaker ignored missing answers and the provider never answered,
                # every email of the queue would become held.
                self.breaker.time_out(trial, outcome.reason)
            case Rejected() | Deferred(fault=AccountFault()) if outcome.concern is not Concern.EMAIL:
                return self._note_doubt(outcome, trial, email, is_already_counted=is_already_counted)
            case Deferred() if outcome.concern is not Concern.EMAIL:
                return self._note_refusal(outcome, trial, email, is_already_counted=is_already_counted)
            case Deferred(code=None) | Rejected(code=None):
                # The adapter refused the content, or failed. Perhaps it made no request, so this outcome says nothing
                # about the provider.
                self.breaker.abandon(trial)
            case Deferred() | Rejected():
                self.breaker.succeed(trial)
            case _:
                assert_never(outcome)
        return Blame.EMAIL

    def _note_refusal(self, refusal: Deferred, trial: int, email: OutgoingEmail, *, is_already_counted: bool) -> Blame:
        """Updates the breaker with a refusal that may concern the provider as a whole."""
        is_throttled = refusal.reason is Reason.THROTTLED
        witness = None if refusal.concern is Concern.PROVIDER else email
        if is_already_counted:
            self.breaker.abandon(trial)
            is_unknown = is_throttled or witness is None
            blame = Blame.PROVIDER if not self.is_closed else Blame.UNKNOWN if is_unknown else Blame.EMAIL
        elif is_throttled or (
            refusal.reason in CONCERNS_PROVIDER and (refusal.retry_after or 0.0) > LONGEST_OPEN_SECONDS
        ):
            blame = self.breaker.pause(trial, refusal.retry_after, refusal.reason, witness)
        else:
            is_unreached = refusal.reason is not Reason.SERVER_ERROR and witness is None
            blame = self.breaker.fail(
                trial,
                _words_of(refusal) if witness is None else refusal.reason,
                witness,
                in_a_row=UNREACHED_IN_A_ROW if is_unreached else FAILURES_IN_A_ROW,
                by_recipient=refusal.reason is Reason.RECIPIENT_DEFERRED,
            )
        if is_throttled:
            metrics.THROTTLES.add(1, self.name)
            if self.limit and blame is Blame.PROVIDER:
                self.limit.slow_down()
        return blame

    def _note_doubt(
        self, refusal: Deferred | Rejected, trial: int, email: OutgoingEmail, *, is_already_counted: bool
    ) -> Blame:
        """Updates the breaker with a refusal that only the answers to other emails explain."""
        fault = refusal.fault or (SENDER if refusal.reason is Reason.REJECTED_SENDER else _UNKNOWN)
        words = f"{refusal.reason} ({refusal.code}): {refusal.detail or ''}".rstrip(".: ")
        return self.breaker.refuse(
            trial,
            renamed(f"{words}. {fault.remedy}", self.name),
            email,
            in_a_row=fault.in_a_row,
            by_sender=fault.by_sender,
            seconds=fault.seconds,
            gives_up=refusal.fault is None,
            is_already_counted=is_already_counted,
        )

    def record_fault(self, fault: ProviderFault, trial: int, email: OutgoingEmail) -> Blame:
        """Records that the provider could not be used, for example because of its credentials. Returns who is at
        fault."""
        return self.breaker.open(trial, renamed(str(fault), self.name), email, seconds=fault.seconds)


class Routes:
    """The routes of one worker, in the operator's order. By `weights`, the lanes share the worker and the rate
    limits."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        weights: LaneWeights | None = None,
        domains: DomainGates | None = None,
        simulator: Route | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`weights` is the same object as in the routes' rate limits. By `jitter`, emails that wait for one provider
        are not all due at the same time. `simulator` takes the emails of test keys, and nothing else: a test shows
        nothing about the providers, and does not wake a worker whose providers have all failed."""
        self._routes = tuple(routes)
        self._simulator = simulator
        self.weights = weights or LaneWeights()
        self.domains = domains or DomainGates()
        self._jitter = jitter

    def choose(self, email: OutgoingEmail, left_out: Collection[str] = ()) -> Route | None:
        """The first route that can send the email and may be tried now. `left_out`: providers that have just refused
        it."""
        for route in self._routes:
            if (
                route.name not in left_out
                and route.may_take(email)
                and route.capabilities.unmet_requirement(email) is None
            ):
                return route
        return self._simulator if email.channel == TEST_CHANNEL else None

    @property
    def providers(self) -> Sequence[Provider]:
        return [route.provider for route in self._routes]

    @property
    def copies(self) -> int:
        """How much memory an email may need, as a multiple of its attachments: the maximum over all providers."""
        return max(route.capabilities.copies for route in self._routes)

    def key_seconds(self, name: str) -> float | None:
        """For how many seconds a provider remembers an idempotency key. None if it has no such keys, or is unknown."""
        return next((one.capabilities.idempotency_key_seconds for one in self._routes if one.name == name), None)

    def others(self, name: str) -> frozenset[str]:
        return frozenset(route.name for route in self._routes if route.name != name)

    def capability_gap(self, email: OutgoingEmail, left_out: Collection[str] = ()) -> CapabilityGap | None:
        """Why no configured provider can ever send the email; None if at least one provider can."""
        return capability_gap(
            email, {route.name: route.capabilities for route in self._routes if route.name not in left_out}
        )

    def serve(self, channel: str) -> bool:
        return any(route.capabilities.channel == channel for route in self._routes)

    def capable(self, email: OutgoingEmail, unable: Collection[str] = ()) -> list[Route]:
        """The routes that could send the email, now or later."""
        return [
            route
            for route in self._routes
            if route.name not in unable and route.capabilities.unmet_requirement(email) is None
        ]

    def delay_seconds(self, able: Sequence[Route]) -> float:
        """The seconds until an email should be due again, because none of the routes that could send it may be tried
        now.

        If `able` contains only some routes, the worker continues to lease emails for the others. Without a delay, it
        would lease and release this email again and again. If it contains all, returns 0: the worker leases nothing
        meanwhile.
        """
        if len(able) == len(self._routes):
            return 0.0
        wait_seconds = min((route.wait_seconds for route in able), default=0.0)
        bounded = min(max(wait_seconds, MIN_DELAY_SECONDS), LONGEST_OPEN_SECONDS)
        return bounded * (1 + DELAY_SPREAD * self._jitter())

    @staticmethod
    def suspect_wait_seconds(able: Sequence[Route], email: OutgoingEmail) -> float:
        """How long a suspect email must let other emails probe these routes; 0 if it is not suspect."""
        open_routes = (route for route in able if not route.is_paused)
        return max((route.breaker.suspect_wait_seconds(email) for route in open_routes), default=0.0)

    @property
    def is_probing(self) -> bool:
        return self.room == 1

    @property
    def room(self) -> int | None:
        """How many emails may be leased: None for no limit, 1 for a probe, 0 while no provider may be tried."""
        rooms = [route.room for route in self._routes]
        return None if None in rooms else max(room for room in rooms if room is not None)

    @property
    def wait_seconds(self) -> float:
        """Seconds until a route may be tried; 0 if now, infinite while an operator pauses all routes."""
        return min(route.wait_seconds for route in self._routes)

    @property
    def change_seconds(self) -> float | None:
        """Seconds until one more route may be tried; None if only routes that operators paused may not."""
        waits = [seconds for route in self._routes if (seconds := route.wait_seconds) and seconds < math.inf]
        return min(waits, default=None)

    def pause(self, providers: Collection[str]) -> bool:
        """Pauses exactly these providers, and resumes all others. Returns whether this changed anything."""
        changed = [route for route in self._routes if route.is_paused != (route.name in providers)]
        for route in changed:
            route.is_paused = not route.is_paused
        return bool(changed)

    def resume(self, providers: Collection[str]) -> None:
        for route in self._routes:
            if route.name in providers:
                route.breaker.resume()

    @property
    def paused(self) -> frozenset[str]:
        return frozenset(route.name for route in self._routes if route.is_paused)

    @property
    def are_all_paused(self) -> bool:
        return all(route.is_paused for route in self._routes)

    def window(self, most: int, seconds: float) -> int:
        """The prefetch window: at most `most` emails, and what the rate ceilings allow in `seconds`. More would only
        wait for tokens, and RabbitMQ closes a channel if a delivery stays unacked for half an hour."""
        ceilings = [route.limit.ceiling for route in self._routes if route.limit]
        return most if len(ceilings) < len(self._routes) else max(1, min(most, math.ceil(sum(ceilings) * seconds)))

    async def close(self) -> None:
        for route in (*self._routes, *([self._simulator] if self._simulator else [])):
            await route.provider.close()


def _words_of(refusal: Deferred) -> str:
    """The reason, code and words of a refusal that concerns no email, such as `server_error (421 4.3.2): too busy`."""
    code = f" ({refusal.code})" if refusal.code else ""
    return f"{refusal.reason}{code}: {refusal.detail}" if refusal.detail else f"{refusal.reason}{code}"
