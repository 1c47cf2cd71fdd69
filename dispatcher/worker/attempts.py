"""One attempt for one email, over the first provider that can carry it and may be tried now.

Where a provider refuses for reasons of its own that burn no attempt (credentials, throttling, an open breaker), or
finds that it cannot carry the email, the next one in order is tried within the same attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import NamedTuple

from dispatcher.domain.echo import without_echo, words_without_echo
from dispatcher.domain.header_names import headers_fault
from dispatcher.domain.outcome import CONCERNS_PROVIDER, Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.providers.contract import Attempt, NoPlace
from dispatcher.routing.breaker import LONGEST_OPEN_SECONDS
from dispatcher.routing.evidence import Blame
from dispatcher.routing.rate import RateLimit
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.results import storable
from dispatcher.telemetry.log import get_log
from dispatcher.worker.coalescing import Coalescing
from dispatcher.worker.in_flight_email import Event, InFlightEmail, LeaseRanOut, State


class NoRoute(Exception):
    """No provider that can carry the email may be tried now. Never leaves the worker.

    Attributes:
        away_seconds: How long the email is to stay out of the queue.
    """

    def __init__(self, away_seconds: float = 0.0) -> None:
        super().__init__()
        self.away_seconds = away_seconds


class TryLater(Exception):
    """Nothing of the email left, no attempt is burnt, and it is to be tried again here. Never leaves the worker.

    Attributes:
        seconds: How long to wait first.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class _RouteClosed(Exception):
    """The provider may not be tried any more, and nothing has begun. Never leaves this file but through an adapter."""


class LedgerAttempt(Attempt):
    """An attempt whose reports move the email to its next state, and write the ledger.

    Attributes:
        trial: The route's number for it.
    """

    __slots__ = ("_ledger", "_rendered_at", "_timeout_seconds", "email", "route", "trial")

    def __init__(self, email: InFlightEmail, route: Route, ledger: Ledger, timeout_seconds: float) -> None:
        """Begins now."""
        super().__init__(email.attempt_number, asyncio.get_running_loop().time() + timeout_seconds)
        self.email = email
        self.route = route
        self.trial = route.breaker.begin()
        self._ledger = ledger
        self._timeout_seconds = timeout_seconds
        self._rendered_at: int | None = None
        email.begin_attempt(route.name)

    def leaving(self) -> None:
        """See the contract.

        Raises:
            LeaseRanOut: The lease may have ended, or the email was stopped, or concluded by a drain that ran out of
                time.
        """
        email = self.email
        if email.state is State.ON_THE_WIRE:
            return
        if not email.may(Event.NAME) or not self._is_lease_valid():
            raise LeaseRanOut
        email.ledger_slot = self._ledger.leaving(
            email.lease.email_id,
            email.lease.token,
            email.attempt_number,
            provider=email.provider,
            started_at=email.started_at,
            policy=email.policy,
        )
        email.on(Event.NAME)
        # Again, and only this look counts: we may have been frozen before the slot was written, and the relay has read
        # it without us (see `host.ledger`). The first look spares it slots of leases that are over.
        if not self._is_lease_valid():
            self.came_back()
            raise LeaseRanOut
        email.on(Event.LEAVE)

    def _is_lease_valid(self) -> bool:
        email = self.email
        return email.confirmed_at > self._ledger.voided_at and steady_clock() < email.leased_until

    def came_back(self) -> None:
        """See the contract. Idempotent."""
        email = self.email
        if email.ledger_slot is not None and email.may(Event.COME_BACK):
            self._ledger.clear(email.ledger_slot)
            email.ledger_slot = None
            email.on(Event.COME_BACK)

    def admitted(self) -> None:
        """See the contract."""
        if not self.route.breaker.may_go_on(self.trial):
            raise _RouteClosed
        self.deadline = asyncio.get_running_loop().time() + self._timeout_seconds

    @property
    def rendering(self) -> LedgerAttempt:
        """See the contract."""
        return self

    def __enter__(self) -> None:
        self._rendered_at = self._ledger.begin_rendering(self.email.lease.email_id, self.email.lease.token)

    def __exit__(self, *_: object) -> None:
        self._ledger.end_rendering(self._rendered_at)


class Ride(NamedTuple):
    """An attempt by a call that the email shares with others, and what the adapter will say."""

    attempt: LedgerAttempt
    outcome: asyncio.Future[Outcome]


class Attempts:
    """Makes attempts; nothing here writes to the database."""

    def __init__(
        self, routes: Routes, ledger: Ledger, *, timeout_seconds: float, allowed_headers: Collection[str] = ()
    ) -> None:
        """
        Args:
            timeout_seconds: One attempt's total deadline.
            allowed_headers: Headers that command a provider and are allowed nevertheless.
        """
        self._routes = routes
        self._ledger = ledger
        self._timeout_seconds = timeout_seconds
        self._allowed_headers = allowed_headers
        self._log = get_log()

    def begin(self, email: InFlightEmail) -> Ride | None:
        """Begins an attempt by a call that is shared: nobody has to wait for it. None where somebody has to."""
        content = email.content
        if content is None:
            return None
        route = self._routes.choose(content)
        if route is None or route.limit or not isinstance(route.provider, Coalescing) or self._forbidden(content):
            return None
        attempt = self._attempt(email, route)
        try:
            outcome = route.provider.begin(content, attempt)
        except Exception:  # noqa: BLE001 - `make` comes upon it again, and judges it
            outcome = None
        if outcome is None:
            route.breaker.give_up(attempt.trial)
            return None
        return Ride(attempt, outcome)

    def accepted(self, email: InFlightEmail, ride: Ride) -> Outcome | None:
        """The outcome of a ride that has ended as nearly all do; None where it is for `make` to say."""
        attempt, done = ride
        if done.cancelled() or done.exception() is not None or not isinstance(outcome := done.result(), Accepted):
            return None
        assert email.content is not None
        try:
            outcome = without_echo(storable(outcome), email.content)
        except Exception:  # noqa: BLE001 - an answer that is none
            return None
        attempt.route.note(outcome, attempt.trial, email.content)
        return outcome

    async def make(self, email: InFlightEmail, ride: Ride | None = None) -> Outcome:
        """What became of one attempt; `email.provider` names whom it went to.

        Args:
            ride: The attempt, if it has begun as a ride.

        Raises:
            NoRoute, TryLater, LeaseRanOut, CancelledError: nothing left, or the provider took nothing; no attempt is
                burnt.
        """
        content = email.content
        if content is None:
            return self._refused(email, Reason.CONTENT_DELETED, "The email's content was deleted before it was sent.")
        if ride is None and (why := self._forbidden(content)):
            return self._refused(email, Reason.INVALID_CONTENT, why)
        answer: Awaitable[Outcome]
        while True:
            if ride is not None:
                (attempt, answer), ride = ride, None
            else:
                route = self._choose(email, content)
                if route is None:
                    return self._uncarried(email, content)
                if route.limit is not None and not await _has_token(route, route.limit):
                    continue
                attempt = self._attempt(email, route)
                answer = route.provider.send(content, attempt)
            outcome = await self._outcome(attempt, content, answer)
            if outcome is not None and not self._passes_on(email, content, attempt.route, outcome):
                return outcome
            attempt.came_back()
            if email.state not in (State.PREPARING, State.STOPPED):  # the drain ran out of time meanwhile
                raise NoRoute

    def unreadable(self, email: InFlightEmail, why: str) -> Outcome:
        """The outcome of an attempt whose content PostgreSQL cannot read."""
        return self._refused(email, Reason.CONTENT_UNREADABLE, why)

    def may_fail_over(self, email: InFlightEmail, outcome: Outcome) -> bool:
        """Whether the next attempt goes to another provider at once, because the one that refused spoke of itself."""
        if email.content is None or not isinstance(outcome, Deferred) or outcome.reason not in CONCERNS_PROVIDER:
            return False
        email.refused_by |= {email.provider}
        return self._routes.choose(email.content, email.refused_by | email.unable) is not None

    def failed(self, email: InFlightEmail, error: BaseException) -> Outcome:
        """What it means that the adapter, or what we made of its answer, failed."""
        kind = type(error).__name__
        self._log.error("error.unexpected", where=email.provider, error=kind, email_id=str(email.email_id))
        if email.state is State.ON_THE_WIRE:
            return Uncertain(f"Our adapter failed while it waited for the answer: {kind}.")
        return Deferred(Reason.INTERNAL_ERROR, f"Our adapter failed: {kind}.")

    def _attempt(self, email: InFlightEmail, route: Route) -> LedgerAttempt:
        return LedgerAttempt(email, route, self._ledger, self._timeout_seconds)

    def _refused(self, email: InFlightEmail, reason: Reason, why: str) -> Rejected:
        """The outcome of an attempt that goes to no provider."""
        email.begin_attempt(email.provider or self._routes.first_name)
        return Rejected(reason, why)

    def _forbidden(self, content: OutgoingEmail) -> str | None:
        """Why no provider may get the email: its headers were checked elsewhere, by other settings than this host's."""
        return headers_fault(content.headers, self._allowed_headers) if content.headers else None

    def _choose(self, email: InFlightEmail, content: OutgoingEmail) -> Route | None:
        """The route that may be tried now; None if no provider could ever carry the email.

        Raises:
            NoRoute: those that could may not be tried now.
            TryLater: one of those is to be probed by other emails first.
        """
        if _is_told_to_end(email):  # an adapter did not notice
            raise asyncio.CancelledError
        choose, unable = self._routes.choose, email.unable
        route = choose(content, email.refused_by | unable) or choose(content, unable)
        if route is None and (able := self._routes.able(content, unable)):
            if seconds := self._routes.doubt_seconds(able, content):
                raise TryLater(seconds)
            raise NoRoute(self._routes.away_seconds(able))
        return route

    def _uncarried(self, email: InFlightEmail, content: OutgoingEmail) -> Rejected:
        """The outcome for an email that no provider could ever carry."""
        why = self._routes.uncarried(content)
        assert why is not None, "a provider that found itself unable was the last one, and its refusal is the outcome"
        return self._refused(email, why.reason, str(why))

    def _passes_on(self, email: InFlightEmail, content: OutgoingEmail, route: Route, outcome: Outcome) -> bool:
        """Whether the adapter itself found that its provider cannot carry the email, and another one could."""
        if not isinstance(outcome, Rejected) or outcome.code is not None:
            return False
        email.unable |= {route.name}
        return bool(self._routes.able(content, email.unable))

    async def _outcome(
        self, attempt: LedgerAttempt, content: OutgoingEmail, answer: Awaitable[Outcome]
    ) -> Outcome | None:
        """The outcome of what was begun, noted by its route; None if the email is not at fault.

        Raises:
            TryLater: it is unknown whose fault it is, and no other provider may be tried.
            LeaseRanOut, CancelledError: nothing left.
        """
        route, trial = attempt.route, attempt.trial
        try:
            outcome = await self._judged(attempt.email, content, answer)
        except ProviderFault as fault:
            blame = route.note_fault(fault, trial, content)
            return Deferred(Reason.REFUSED, fault.message) if blame is Blame.EMAIL else None
        except (_RouteClosed, NoPlace):
            route.breaker.give_up(trial)
            return None
        except BaseException:
            route.breaker.give_up(trial)
            raise
        match route.note(outcome, trial, content, is_told_already=attempt.is_told_already):
            case Blame.EMAIL:
                return outcome
            case Blame.UNKNOWN:
                self._leave_it_for_later(attempt, content, outcome)
        return None

    def _leave_it_for_later(self, attempt: LedgerAttempt, content: OutgoingEmail, outcome: Outcome) -> None:
        """Returns if another provider may be tried.

        Raises:
            TryLater: None may.
        """
        email, breaker = attempt.email, attempt.route.breaker
        email.refused_by |= {attempt.route.name}
        if self._routes.choose(content, email.refused_by | email.unable) is not None:
            return
        email.refused_by = frozenset()
        attempt.came_back()
        asked = outcome.retry_after if isinstance(outcome, Deferred) else None
        raise TryLater(min(max(breaker.lone_seconds(content), asked or 0.0), LONGEST_OPEN_SECONDS))

    async def _judged(self, email: InFlightEmail, content: OutgoingEmail, answer: Awaitable[Outcome]) -> Outcome:
        """What the adapter says; whatever else it raises is judged by whether anything left."""
        try:
            return without_echo(storable(await answer), content)
        except (LeaseRanOut, _RouteClosed, NoPlace):
            raise
        except ProviderFault as fault:
            words = words_without_echo(scrub(fault.message), content)
            raise ProviderFault(fault.provider, words, remedy=fault.remedy) from fault
        except asyncio.CancelledError as error:
            if _is_told_to_end(email):
                raise
            return self.failed(email, error)  # what it waited for was cancelled, not we
        except Exception as error:  # noqa: BLE001 - an adapter's bug must cost one email's attempt, not the worker
            return self.failed(email, error)


async def _has_token(route: Route, limit: RateLimit) -> bool:
    """Waits for a token, as long as one would help; whether the route may still be tried then."""
    return await limit.take(lambda: route.may_be_tried) and route.may_be_tried


def _is_told_to_end(email: InFlightEmail) -> bool:
    """Whether the email was stopped, or the process ends."""
    task = asyncio.current_task()
    return email.state is State.STOPPED or (task is not None and task.cancelling() > 0)
