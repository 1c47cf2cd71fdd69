"""One attempt to send one email, by the first provider that can send it and may be tried now.

The next provider is tried within the same attempt in three cases: a provider refuses the email for a reason that
concerns the provider (such as wrong credentials, or throttling); the provider's circuit breaker opens; or the adapter
finds that its provider cannot send the email. If a provider may have accepted the email under an idempotency key, only
this provider is tried.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, NamedTuple

from dispatcher.domain.accounts import AccountRules
from dispatcher.domain.headers import headers_fault
from dispatcher.domain.outcome import CONCERNS_PROVIDER, Accepted, Deferred, Outcome, Pin, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import EMAIL_CHANNEL, OutgoingEmail
from dispatcher.domain.provider_text import without_echo, words_without_echo
from dispatcher.domain.raw_mime import raw_fault
from dispatcher.domain.scrub import scrub
from dispatcher.domain.sms import SMS_CHANNEL, SmsRules
from dispatcher.errors import ProviderFault
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.providers.contract import Attempt, NoFreeConnection, PromptProvider, SendAgain
from dispatcher.routing.breaker import LONGEST_OPEN_SECONDS
from dispatcher.routing.evidence import Blame
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.results import storable
from dispatcher.telemetry.log import get_log
from dispatcher.telemetry.storms import CountedLine
from dispatcher.worker.in_flight_email import EmailEvent, EmailState, InFlightEmail, LeaseExpired

NO_PROVIDER: Final = "none"
"""The provider's name in the record of an attempt that made no request."""
CHANNEL_SECONDS: Final = 30.0
"""An SMS that reaches a host without a provider for SMS is due again after this time, because another host may have
such a provider."""
OTHER_WORKERS_SECONDS: Final = 4.0
"""An undecided rejection that waits this long is released. Each worker judges by the refusals that it has seen. So if
there are few emails, each of many workers gets to see several of them."""


class NoRoute(Exception):
    """None of the providers that can send the email may be tried now, or another worker may try them next; due again
    after `delay_seconds`."""

    def __init__(self, delay_seconds: float = 0.0) -> None:
        super().__init__()
        self.delay_seconds = delay_seconds


class TryLater(Exception):
    """The email was not sent, and this worker must try again after `seconds`. This try does not count."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class _RouteClosed(Exception):
    """The breaker opened, or the provider was paused, before the email was sent; raised in the adapter's call."""


class LedgerAttempt(Attempt):
    """One attempt to send an email: reports the adapter's progress to the email's state and the in-flight ledger."""

    __slots__ = ("_ledger", "_now", "_rendered_at", "_timeout_seconds", "email", "route", "trial")

    def __init__(
        self, email: InFlightEmail, route: Route, ledger: Ledger, now: Callable[[], float], timeout_seconds: float
    ) -> None:
        Attempt.__init__(self, email.attempt_number, now() + timeout_seconds)  # faster than `super()`
        self.email = email
        self.route = route
        self.trial = route.breaker.begin()
        self._ledger = ledger
        self._now = now
        self._timeout_seconds = timeout_seconds
        self._rendered_at: int | None = None
        email.begin_attempt(route.name)

    def mark_on_wire(self) -> None:
        """Checks the lease, and marks the email as on the wire in the in-flight ledger. Idempotent. Raises LeaseExpired
        if the lease may have ended, the email has expired or was stopped, or a drain that timed out has ended this
        attempt."""
        email = self.email
        if email.state is EmailState.ON_THE_WIRE:
            return
        if not email.may(EmailEvent.MARK) or not self._may_send():
            raise LeaseExpired
        email.ledger_slot = self._ledger.mark_on_wire(
            email.lease.email_id,
            email.lease.token,
            email.attempt_number,
            provider=email.provider,
            started_at=email.started_at,
            policy=email.policy,
        )
        email.on(EmailEvent.MARK)
        # Check again, because the process may have been frozen just before it wrote the slot. Then the relay has read a
        # ledger without this slot, and may have released the email to another worker (see `host.ledger`). The first
        # check only avoids writing a slot for a lease that has already ended.
        if not self._may_send():
            self.mark_not_sent()
            raise LeaseExpired
        email.on(EmailEvent.SEND)

    def _may_send(self) -> bool:
        email = self.email
        now = steady_clock()
        return email.confirmed_at > self._ledger.voided_at and now < email.leased_until and now < email.expires_at

    def mark_not_sent(self) -> None:
        """Clears the attempt's slot in the in-flight ledger. Idempotent."""
        email = self.email
        if email.ledger_slot is not None and email.may(EmailEvent.UNMARK):
            self._ledger.clear(email.ledger_slot)
            email.ledger_slot = None
            email.on(EmailEvent.UNMARK)

    def connection_acquired(self) -> None:
        """Restarts the attempt's deadline. Raises _RouteClosed if the provider may no longer be tried."""
        if self.route.is_paused or not self.route.breaker.may_proceed(self.trial):
            raise _RouteClosed
        self.deadline = self._now() + self._timeout_seconds

    @property
    def expires_in(self) -> float | None:
        seconds = self.email.expires_at - steady_clock()
        return seconds if seconds < math.inf else None

    @property
    def rendering(self) -> LedgerAttempt:
        return self

    def __enter__(self) -> None:
        self._rendered_at = self._ledger.begin_rendering(self.email.lease.email_id, self.email.lease.token)

    def __exit__(self, *_: object) -> None:
        self._ledger.end_rendering(self._rendered_at)


class BegunAttempt(NamedTuple):
    attempt: LedgerAttempt
    outcome: asyncio.Future[Outcome]


class Attempts:
    """Makes attempts to send emails. Writes the in-flight ledger, but nothing to the database. If not `can_begin`, no
    provider can make an attempt without a task, and `begin` always returns None."""

    def __init__(
        self,
        routes: Routes,
        ledger: Ledger,
        *,
        timeout_seconds: float,
        allowed_headers: Collection[str],
        sms: SmsRules,
        rules: AccountRules,
    ) -> None:
        prompt = [provider for provider in routes.providers if isinstance(provider, PromptProvider)]
        self._prompt = {provider.name: provider for provider in prompt}
        self.can_begin = bool(prompt)
        self._routes = routes
        self._ledger = ledger
        self._now = asyncio.get_running_loop().time
        self._timeout_seconds = timeout_seconds
        self._allowed_headers = allowed_headers
        self._sms = sms
        # Without rules, no email pays for them.
        self._rules = rules or None
        self._emails = [each.name for each in routes.providers if each.capabilities.channel == EMAIL_CHANNEL]
        self._log = get_log()
        self._without_channel = CountedLine(CHANNEL_SECONDS)

    def begin(self, email: InFlightEmail) -> BegunAttempt | None:
        """Begins an attempt without an asyncio task: in a bulk call, or on an idle connection. Returns None if the
        caller must send the email with `make`, because the attempt would have to wait, or is unusual."""
        content = email.content
        if content is None or email.pin is not None:
            return None
        if self._rules is not None:
            self._leave_out_accounts(self._rules, email, content)
        route = self._routes.choose(content, email.unable)
        if route is None or (provider := self._prompt.get(route.name)) is None or route.limit is not None:
            return None
        if self._forbidden(content) or self._routes.domains.concern(route.name):
            return None
        if route.gate is not None and not route.gate.try_acquire():
            return None
        attempt = self._attempt(email, route)
        try:
            outcome = provider.begin(content, attempt)
        except Exception as error:  # noqa: BLE001 - `make` handles it
            outcome = None
            if email.state is EmailState.ON_THE_WIRE:  # a second request could be a duplicate
                outcome = asyncio.get_running_loop().create_future()
                outcome.set_exception(error)
        if outcome is None:
            route.breaker.abandon(attempt.trial)
            if route.gate is not None:
                route.gate.release()
            return None
        return BegunAttempt(attempt, outcome)

    def accepted(self, email: InFlightEmail, begun: BegunAttempt) -> Outcome | None:
        """The outcome of a begun attempt that has ended, if the provider accepted the email; None for every other
        outcome, which is rare. The caller then passes `begun` to `make`, which handles it. Call this exactly once."""
        attempt, done = begun
        if attempt.route.gate is not None:
            attempt.route.gate.release()
        if done.cancelled() or done.exception() is not None or not isinstance(outcome := done.result(), Accepted):
            return None
        assert email.content is not None
        try:
            outcome = without_echo(storable(outcome), email.content)
        except Exception:  # noqa: BLE001 - an invalid outcome; `make` handles it
            return None
        attempt.route.record_outcome(outcome, attempt.trial, email.content)
        return outcome

    async def make(self, email: InFlightEmail, begun: BegunAttempt | None = None) -> Outcome:
        """Makes one attempt and returns its outcome. Sets `email.provider` to the provider that was tried.

        `begun` is an attempt from `begin`: another provider is tried only if its provider did not accept the email. If
        NoRoute, TryLater, DomainFull, LeaseExpired or CancelledError is raised, the email was not sent, or is known not
        to be accepted: this try does not count.
        """
        if begun is None and (unsent := self._unsendable(email)):
            return unsent
        content = email.content
        assert content is not None
        answer: Awaitable[Outcome]
        while True:
            if begun is not None:
                (attempt, answer), begun = begun, None
                outcome = await self._outcome(attempt, content, answer)
            else:
                route = self._choose(email, content)
                if route is None:
                    why = self._routes.capability_gap(content, email.unable)
                    assert why is not None, "if adapters refused, the outcome is the last adapter's refusal"
                    return self._refused(email, why.reason, str(why))
                if self._routes.domains.concern(route.name):
                    ended = await self._try_within_ceilings(email, content, route)
                else:
                    ended = await self._try(email, content, route)
                if ended is None:
                    continue
                attempt, outcome = ended
            if outcome is not None and not self._has_next_provider(email, content, attempt.route, outcome):
                return outcome
            attempt.mark_not_sent()
            # If a drain that timed out has already ended this attempt, do not begin another attempt.
            if email.state not in (EmailState.PREPARING, EmailState.STOPPED):
                raise NoRoute

    async def _try(
        self, email: InFlightEmail, content: OutgoingEmail, route: Route
    ) -> tuple[LedgerAttempt, Outcome | None] | None:
        if route.limit is not None:
            is_granted = await route.limit.take(lambda: route.may_be_tried, email.delivery.lane)
            if not (is_granted and route.may_be_tried):
                return None
        if (gate := route.gate) is not None and not gate.try_acquire():
            await gate.acquire(email.delivery.lane)
        try:
            attempt = self._attempt(email, route)
            return attempt, await self._outcome(attempt, content, route.provider.send(content, attempt))
        finally:
            if gate is not None:
                gate.release()

    async def _try_within_ceilings(
        self, email: InFlightEmail, content: OutgoingEmail, route: Route
    ) -> tuple[LedgerAttempt, Outcome | None] | None:
        """Like `_try`, but first waits a short time for the ceilings of the recipient domains; raises DomainFull."""
        gates = await self._routes.domains.enter(content)
        began_at = self._now()
        try:
            ended = await self._try(email, content, route) if route.may_be_tried else None
        except BaseException:
            for gate in gates:
                gate.leave(None)
            raise
        for gate in gates:
            if ended is None:
                gate.give_back()
            else:
                gate.leave(self._now() - began_at)
        return ended

    def unreadable(self, email: InFlightEmail, why: str) -> Outcome:
        return self._refused(email, Reason.CONTENT_UNREADABLE, why)

    def suppressed(self, email: InFlightEmail, reasons: Mapping[int, str]) -> Outcome:
        """The outcome if all recipients are suppressed or kept back."""
        why = ", ".join(dict.fromkeys(reasons.values()))
        other = "other " if email.lease.recipient_outcomes else ""
        if Reason.KEPT_BACK in reasons.values():
            also = "" if why == Reason.KEPT_BACK else f": {why}"
            words = f"No {other}recipient may get email from this host (DISPATCHER_ALLOW_RECIPIENTS){also}."
            return self._refused(email, Reason.KEPT_BACK, words)
        return self._refused(email, Reason.SUPPRESSED, f"Every {other}recipient is suppressed: {why}.")

    def may_fail_over(self, email: InFlightEmail, outcome: Outcome) -> bool:
        """Whether to try another provider immediately, because the outcome is a refusal that concerns the provider, and
        not the email. Adds the provider to `email.refused_by`."""
        if email.content is None or not isinstance(outcome, Deferred) or outcome.reason not in CONCERNS_PROVIDER:
            return False
        email.refused_by |= {email.provider}
        return self._routes.choose(email.content, email.refused_by | email.unable) is not None

    def failed(self, email: InFlightEmail, error: BaseException) -> Outcome:
        """The outcome if the adapter, or our code that handles its answer, raised an exception."""
        kind = type(error).__name__
        self._log.error("error.unexpected", where=email.provider, error=kind, email_id=str(email.email_id))
        if email.state is EmailState.ON_THE_WIRE:
            return Uncertain(f"Our adapter failed while it waited for the answer: {kind}.")
        return Deferred(Reason.INTERNAL_ERROR, f"Our adapter failed: {kind}.")

    def pin_of(self, email: InFlightEmail, outcome: Outcome) -> tuple[Pin, float] | None:
        """The only provider that may be tried again, because it may have accepted the email, and in how many seconds
        its idempotency key expires (negative if it has). None if every outcome is known, or the provider has no such
        keys."""
        pin = email.pin
        if pin is None:
            if not isinstance(outcome, Uncertain) or self._routes.key_seconds(email.provider) is None:
                return None
            pin = email.attempt_pin
        return pin, (self._routes.key_seconds(pin.provider) or 0.0) - (steady_clock() - pin.since)

    def _attempt(self, email: InFlightEmail, route: Route) -> LedgerAttempt:
        return LedgerAttempt(email, route, self._ledger, self._now, self._timeout_seconds)

    def _refused(self, email: InFlightEmail, reason: Reason, why: str) -> Rejected:
        """The outcome if we refuse the email ourselves, recorded for the provider to which the email is pinned."""
        email.begin_attempt(email.pin.provider if email.pin else NO_PROVIDER)
        return Rejected(reason, why)

    def _unsendable(self, email: InFlightEmail) -> Outcome | None:
        """The outcome of an email that must not be sent to any provider; None if it may be sent."""
        if email.content is None:
            return self._refused(email, Reason.CONTENT_DELETED, "The email's content was deleted before it was sent.")
        if forbidden := self._forbidden(email.content):
            return self._refused(email, *forbidden)
        if (pin := email.pin) is None:
            if self._rules is not None:
                self._leave_out_accounts(self._rules, email, email.content)
            return None
        email.unable = self._routes.others(pin.provider)
        key_seconds = self._routes.key_seconds(pin.provider)
        if key_seconds is not None and steady_clock() - pin.since < key_seconds:
            return None
        email.begin_attempt(pin.provider)
        lost = "the email's idempotency key has expired"
        if key_seconds is None:
            lost = f"this host no longer uses idempotency keys of {pin.provider}"
        why = f"{pin.provider} may have accepted the email, but {lost}, so another attempt could send a duplicate."
        return Uncertain(why)

    def _leave_out_accounts(self, rules: AccountRules, email: InFlightEmail, content: OutgoingEmail) -> None:
        """Leaves out the accounts that the rules do not allow the email."""
        if content.channel == EMAIL_CHANNEL:
            tenant, lane = email.lease.tenant_id, email.delivery.lane
            email.unable |= {*self._emails}.difference(
                rules.allowed(self._emails, tenant=tenant, sender=content.sender, lane=lane)
            )

    def _forbidden(self, content: OutgoingEmail) -> tuple[Reason, str] | None:
        """Checks headers and SMS again: the enqueuing host may allow more, and rows may be written without our
        library."""
        if content.channel != SMS_CHANNEL:
            why = headers_fault(content.headers, self._allowed_headers) if content.headers else None
            if content.raw is not None and (of_raw := raw_fault(content.raw, self._allowed_headers)):
                why = f"raw {of_raw}"
            return (Reason.INVALID_CONTENT, why) if why else None
        fault = self._sms.fault(next(iter(content.to), ""), content.text or "")
        if fault and fault.field == "to":
            return Reason.REJECTED_RECIPIENT, f"The recipient {fault.reason}."
        return (Reason.INVALID_CONTENT, f"The text {fault.reason}.") if fault else None

    def _choose(self, email: InFlightEmail, content: OutgoingEmail) -> Route | None:
        """The route to try now; None if no provider could ever send the email. Raises TryLater if all that could have
        failed, perhaps because of this email, so that they must be probed with other emails first."""
        # Raise CancelledError again: the email was stopped, or its task was cancelled, but an adapter caught the error.
        if _must_end(email):
            raise asyncio.CancelledError
        choose, unable = self._routes.choose, email.unable
        others = choose(content, email.refused_by | unable) if email.refused_by else None
        route = others or choose(content, unable)
        if route is None and (able := self._routes.capable(content, unable)):
            if seconds := self._routes.suspect_wait_seconds(able, content):
                raise TryLater(seconds)
            raise NoRoute(self._routes.delay_seconds(able))
        if route is None and not self._routes.serve(content.channel):
            if count := self._without_channel.due():
                email_id, channel = str(email.email_id), content.channel
                self._log.warning("email.no_channel", email_id=email_id, channel=channel, count=count)
            raise NoRoute(CHANNEL_SECONDS)
        return route

    def _has_next_provider(self, email: InFlightEmail, content: OutgoingEmail, route: Route, outcome: Outcome) -> bool:
        if not isinstance(outcome, Rejected) or outcome.code is not None:
            return False
        email.unable |= {route.name}
        return bool(self._routes.capable(content, email.unable))

    async def _outcome(
        self, attempt: LedgerAttempt, content: OutgoingEmail, answer: Awaitable[Outcome]
    ) -> Outcome | None:
        """Awaits the outcome and reports it to the route's breaker. None if the caller may try another provider."""
        route, trial = attempt.route, attempt.trial
        try:
            outcome = await self._judged(attempt.email, content, answer)
        except ProviderFault as fault:
            blame = route.record_fault(fault, trial, content)
            return Deferred(Reason.REFUSED, fault.message) if blame is Blame.EMAIL else None
        except (_RouteClosed, NoFreeConnection, SendAgain):
            route.breaker.abandon(trial)
            return None
        except BaseException:
            route.breaker.abandon(trial)
            raise
        match route.record_outcome(outcome, trial, content, is_already_counted=attempt.is_already_counted):
            case Blame.EMAIL:
                return outcome
            case Blame.UNKNOWN:
                self._try_later_without_alternative(attempt, content, outcome)
        return None

    def _try_later_without_alternative(self, attempt: LedgerAttempt, content: OutgoingEmail, outcome: Outcome) -> None:
        email, breaker = attempt.email, attempt.route.breaker
        email.refused_by |= {attempt.route.name}
        if self._routes.choose(content, email.refused_by | email.unable) is not None:
            return
        email.refused_by = frozenset()
        attempt.mark_not_sent()
        asked = outcome.retry_after if isinstance(outcome, Deferred) else None
        seconds = min(max(breaker.single_email_wait_seconds(content), asked or 0.0), LONGEST_OPEN_SECONDS)
        assert isinstance(outcome, Deferred | Rejected)  # only a refusal can be undecided
        self._log.warning(  # PostgreSQL has no record of an undecided refusal
            "email.refusal_undecided",
            email_id=str(email.email_id),
            provider=attempt.route.name,
            error_type=outcome.reason,
            provider_code=outcome.code,
            reason=outcome.detail,
            retry_in_seconds=round(seconds, 1),
        )
        if isinstance(outcome, Rejected) and seconds >= OTHER_WORKERS_SECONDS:
            raise NoRoute(seconds)
        raise TryLater(seconds)

    async def _judged(self, email: InFlightEmail, content: OutgoingEmail, answer: Awaitable[Outcome]) -> Outcome:
        """Awaits the adapter's outcome. An unexpected exception is uncertain if sending had begun, otherwise
        deferred."""
        try:
            return without_echo(storable(await answer), content)
        except (LeaseExpired, _RouteClosed, NoFreeConnection, SendAgain):
            raise
        except ProviderFault as fault:
            raise fault.with_message(words_without_echo(scrub(fault.message), content)) from fault
        except asyncio.CancelledError as error:
            if _must_end(email):
                raise
            return self.failed(email, error)  # a future inside the adapter was cancelled, and not this task
        except Exception as error:  # noqa: BLE001 - an adapter's bug may end one attempt, but not the worker
            return self.failed(email, error)


def _must_end(email: InFlightEmail) -> bool:
    task = asyncio.current_task()
    return email.state is EmailState.STOPPED or (task is not None and task.cancelling() > 0)
