"""One attempt for one email, over the first provider that can carry it and may be tried now. The ledger is written
before anything leaves.

Where a provider refuses for reasons of its own that burn no attempt (credentials, throttling, an open breaker), or
finds that it cannot carry the email, the next one in order is tried within the same attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from contextlib import AbstractContextManager
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
from dispatcher.worker.sending import LeaseRanOut, Phase, Sending


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


class Ride(NamedTuple):
    """An attempt that a call makes which the email shares with others.

    Attributes:
        trial: The route's number for it.
        outcome: What the adapter will say.
    """

    route: Route
    trial: int
    attempt: Attempt
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
        self.ledger = ledger
        self._timeout_seconds = timeout_seconds
        self._allowed_headers = allowed_headers
        self._loop = asyncio.get_running_loop()
        self._log = get_log()

    def begin(self, sending: Sending) -> Ride | None:
        """Begins an attempt that needs nobody to wait for it, because a call carries it; None where one has to."""
        email = sending.email
        if email is None:
            return None
        route = self._routes.choose(email)
        if route is None or route.limit or not isinstance(route.provider, Coalescing) or self._forbidden(email):
            return None
        self._prepare(sending)
        trial = route.breaker.begin()
        attempt = self._attempt(sending, route, trial)
        try:
            outcome = route.provider.begin(email, attempt)
        except Exception:  # noqa: BLE001 - whoever makes the attempt comes upon it again, and judges it
            outcome = None
        if outcome is None:
            route.breaker.give_up(trial)
            return None
        return Ride(route, trial, attempt, outcome)

    def accepted(self, sending: Sending, ride: Ride) -> Outcome | None:
        """The outcome of a ride that has ended as nearly all do; None where it is for `make` to say."""
        done = ride.outcome
        if done.cancelled() or done.exception() is not None or not isinstance(outcome := done.result(), Accepted):
            return None
        assert sending.email is not None
        try:
            outcome = without_echo(storable(outcome), sending.email)
        except Exception:  # noqa: BLE001 - an answer that is none
            return None
        ride.route.note(outcome, ride.trial, sending.email)
        return outcome

    async def make(self, sending: Sending, ride: Ride | None = None) -> Outcome:
        """What became of one attempt; `sending.provider` names whom it went to.

        Args:
            ride: The attempt, if it is one.

        Raises:
            NoRoute, TryLater, LeaseRanOut, CancelledError: nothing left, and no attempt is burnt.
        """
        email = sending.email
        if email is None:
            self._prepare(sending)
            sending.begin_attempt()
            if sending.unreadable is not None:
                return Rejected(Reason.CONTENT_UNREADABLE, sending.unreadable)
            return Rejected(Reason.CONTENT_DELETED, "The email's content was deleted before it was sent.")
        if ride is None and (why := self._forbidden(email)):
            self._prepare(sending)
            sending.begin_attempt()
            return Rejected(Reason.INVALID_CONTENT, why)
        while True:
            if ride is not None:
                route, trial, attempt, answer = ride
                outcome, ride = await self._finish(sending, email, route, trial, attempt, answer), None
            else:
                chosen = self._choose(sending, email)
                if chosen is None:
                    return self._uncarried(sending, email)
                route = chosen
                if route.limit is not None and not await self._has_token(route, route.limit):
                    continue
                outcome = await self._try(sending, email, route)
            if outcome is not None and not self._passes_on(sending, email, route, outcome):
                return outcome
            if sending.is_over:  # the drain ran out of time meanwhile
                raise NoRoute
            self.forget(sending)

    def _forbidden(self, email: OutgoingEmail) -> str | None:
        """Why no provider may get the email: its headers were checked elsewhere, by other settings than this host's."""
        return headers_fault(email.headers, self._allowed_headers) if email.headers else None

    def may_fail_over(self, sending: Sending, outcome: Outcome) -> bool:
        """Whether the next attempt goes to another provider at once, because the one that refused spoke of itself."""
        email = sending.email
        if email is None or not isinstance(outcome, Deferred) or outcome.reason not in CONCERNS_PROVIDER:
            return False
        sending.refused_by.add(sending.provider)
        return self._routes.choose(email, sending.refused_by | sending.unable) is not None

    def forget(self, sending: Sending) -> None:
        """Empties the ledger's slot: nothing left, or the provider says that it took nothing."""
        if sending.ledger_slot is not None:
            self.ledger.clear(sending.ledger_slot)
            sending.ledger_slot = None

    def _choose(self, sending: Sending, email: OutgoingEmail) -> Route | None:
        """The route that may be tried now; None if no provider could ever carry the email.

        Raises:
            NoRoute: those that could may not be tried now.
            TryLater: one of those is to be probed by other emails first.
        """
        if sending.is_cancelled:  # by an adapter that did not hear of it
            raise asyncio.CancelledError
        self._prepare(sending)
        choose, unable = self._routes.choose, sending.unable
        route = choose(email, sending.refused_by | unable) or choose(email, unable)
        if route is None and (able := self._routes.able(email, unable)):
            if seconds := self._routes.doubt_seconds(able, email):
                raise TryLater(seconds)
            raise NoRoute(self._routes.away_seconds(able))
        return route

    def _uncarried(self, sending: Sending, email: OutgoingEmail) -> Rejected:
        """The outcome for an email that no provider could ever carry."""
        sending.begin_attempt()
        why = self._routes.uncarried(email)
        assert why is not None, "a provider that found itself unable was the last one, and its refusal is the outcome"
        return Rejected(why.reason, str(why))

    def _passes_on(self, sending: Sending, email: OutgoingEmail, route: Route, outcome: Outcome) -> bool:
        """Whether the adapter itself found that its provider cannot carry the email, and another one could."""
        if not isinstance(outcome, Rejected) or outcome.code is not None:
            return False
        sending.unable |= {route.name}
        return bool(self._routes.able(email, sending.unable))

    @staticmethod
    async def _has_token(route: Route, limit: RateLimit) -> bool:
        """Waits for a token, as long as one would help; whether the route may still be tried then."""
        return await limit.take(lambda: route.may_be_tried) and route.may_be_tried

    def _prepare(self, sending: Sending) -> None:
        sending.phase = Phase.PREPARING
        sending.provider = sending.provider or self._routes.first_name

    async def _try(self, sending: Sending, email: OutgoingEmail, route: Route) -> Outcome | None:
        """One provider's outcome; see `_finish`."""
        trial = route.breaker.begin()
        attempt = self._attempt(sending, route, trial)
        return await self._finish(sending, email, route, trial, attempt, route.provider.send(email, attempt))

    async def _finish(
        self,
        sending: Sending,
        email: OutgoingEmail,
        route: Route,
        trial: int,
        attempt: Attempt,
        answer: Awaitable[Outcome],
    ) -> Outcome | None:
        """The outcome of what was begun, noted by its route; None if the email is not at fault.

        Raises:
            TryLater: it is unknown whose fault it is, and no other provider may be tried.
            LeaseRanOut, CancelledError: nothing left.
        """
        outcome: Outcome
        try:
            outcome = await self._judged(sending, answer)
        except ProviderFault as fault:
            outcome = Deferred(Reason.REFUSED, fault.message)
            blame = route.note_fault(fault, trial, email)
            return outcome if blame is Blame.EMAIL else None
        except (_RouteClosed, NoPlace):
            route.breaker.give_up(trial)
            return None
        except BaseException:
            route.breaker.give_up(trial)
            raise
        match route.note(outcome, trial, email, is_told_already=attempt.is_told_already):
            case Blame.EMAIL:
                return outcome
            case Blame.UNKNOWN:
                self._wait_alone(sending, email, route, outcome)
        return None

    def _wait_alone(self, sending: Sending, email: OutgoingEmail, route: Route, outcome: Outcome) -> None:
        """Returns if another provider may be tried.

        Raises:
            TryLater: None may.
        """
        sending.refused_by.add(route.name)
        if self._routes.choose(email, sending.refused_by | sending.unable) is not None:
            return
        sending.refused_by.clear()
        asked = outcome.retry_after if isinstance(outcome, Deferred) else None
        raise TryLater(min(max(route.breaker.lone_seconds(email), asked or 0.0), LONGEST_OPEN_SECONDS))

    def _attempt(self, sending: Sending, route: Route, trial: int) -> Attempt:
        """The attempt over this route, which begins now."""
        sending.provider = route.name
        sending.begin_attempt()
        return _Reported(self, sending, route, trial)

    def deadline(self) -> float:
        """When an attempt that begins now must have ended."""
        return self._loop.time() + self._timeout_seconds

    async def _judged(self, sending: Sending, answer: Awaitable[Outcome]) -> Outcome:
        """What the adapter says; whatever else it raises is judged by whether anything left."""
        assert sending.email is not None
        try:
            return without_echo(storable(await answer), sending.email)
        except (LeaseRanOut, _RouteClosed, NoPlace):
            raise
        except ProviderFault as fault:
            words = words_without_echo(scrub(fault.message), sending.email)
            raise ProviderFault(fault.provider, words, remedy=fault.remedy) from fault
        except asyncio.CancelledError as error:
            if sending.is_cancelled:
                raise
            return self.failed(sending, error)  # what it waited for was cancelled, not we
        except Exception as error:  # noqa: BLE001 - an adapter's bug must cost one email's attempt, not the worker
            return self.failed(sending, error)

    def failed(self, sending: Sending, error: BaseException) -> Outcome:
        """What it means that the adapter, or what we made of its answer, failed."""
        kind = type(error).__name__
        self._log.error("fault.unexpected", where=sending.provider, error=kind, email_id=str(sending.email_id))
        if sending.phase is Phase.ON_THE_WIRE:
            return Uncertain(f"Our adapter failed while it waited for the answer: {kind}.")
        return Deferred(Reason.INTERNAL_ERROR, f"Our adapter failed: {kind}.")

    def leave(self, sending: Sending) -> None:
        """Notes that the next byte may cause acceptance; refuses if the lease may have ended, or we were told to stop.

        A second call within an attempt is harmless.
        """
        if sending.phase is Phase.ON_THE_WIRE:
            return
        # A drain that ran out of time has concluded it, while an adapter was about to let it leave again.
        if sending.phase is not Phase.PREPARING or not self._may_leave(sending):
            raise LeaseRanOut
        sending.ledger_slot = self.ledger.leaving(
            sending.email_id,
            sending.lease.token,
            sending.attempt_number,
            provider=sending.provider,
            started_at=sending.started_at,
            policy=sending.policy,
        )
        # Again, and only this look counts: we may have been frozen before the slot was written, and the relay has read
        # it without us (see `host.ledger`). The first look spares it slots of leases that are over.
        if not self._may_leave(sending):
            self.forget(sending)
            raise LeaseRanOut
        sending.phase = Phase.ON_THE_WIRE

    def come_back(self, sending: Sending) -> None:
        """Notes that the provider took nothing of it, and that it will leave again within the attempt."""
        if sending.phase is Phase.ON_THE_WIRE:
            self.forget(sending)
            sending.phase = Phase.PREPARING

    def _may_leave(self, sending: Sending) -> bool:
        if sending.lease_lost or sending.is_cancelled or sending.confirmed_at <= self.ledger.voided_at:
            return False
        return steady_clock() < sending.leased_until


class _Reported(Attempt):
    """An attempt whose reports change the state of its email, the ledger, and the trial of its route."""

    __slots__ = ("_attempts", "_route", "_sending", "_trial")

    def __init__(self, attempts: Attempts, sending: Sending, route: Route, trial: int) -> None:
        super().__init__(sending.attempt_number, attempts.deadline())
        self._attempts = attempts
        self._sending = sending
        self._route = route
        self._trial = trial

    def leaving(self) -> None:
        """See the contract."""
        self._attempts.leave(self._sending)

    def came_back(self) -> None:
        """See the contract."""
        self._attempts.come_back(self._sending)

    def admitted(self) -> None:
        """See the contract."""
        if not self._route.breaker.may_go_on(self._trial):
            raise _RouteClosed
        self.deadline = self._attempts.deadline()

    @property
    def rendering(self) -> AbstractContextManager[None]:
        """Names the email in the ledger meanwhile."""
        return _Rendering(self._attempts.ledger, self._sending)


class _Rendering:
    """Names an email in the ledger while it is being rendered, for `contract.Attempt`."""

    __slots__ = ("_ledger", "_place", "_sending")

    def __init__(self, ledger: Ledger, sending: Sending) -> None:
        self._ledger = ledger
        self._sending = sending
        self._place: int | None = None

    def __enter__(self) -> None:
        self._place = self._ledger.begin_rendering(self._sending.email_id, self._sending.lease.token)

    def __exit__(self, *_: object) -> None:
        self._ledger.end_rendering(self._place)
