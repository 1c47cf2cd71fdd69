"""The send stage: leased emails → outcomes, one email at a time.

    leased ─▶ an attempt, in a task of its own, or in a call that it shares ─▶ outcome ─▶ decided ─▶ to be recorded
                 │ a retry, or another look: waits under the same lease            (a deferral comes back: `retry`)
                 └▶ nothing left, and nothing will: to be given back

Emails that share a call need no task while it is under way: nearly all are accepted, and concluded as the answer comes.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from dispatcher.config import Settings
from dispatcher.domain.decision import RetryIn, decide
from dispatcher.domain.outcome import Deferred, Outcome, Uncertain
from dispatcher.domain.retry import RetryPolicy
from dispatcher.host.batches import Batches
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_format import Flight
from dispatcher.store.results import result_of
from dispatcher.worker.attempts import Attempts, NoRoute, Ride, TryLater
from dispatcher.worker.contents import Contents, NoMemory
from dispatcher.worker.in_flight_email import Ended, Event, InFlightEmail, LeaseRanOut, Returned, State
from dispatcher.worker.report import report_attempt
from dispatcher.worker.window import Window


class SendStage:
    """Sends what was leased, again where it is deferred, until its outcome is final or it is given back."""

    def __init__(
        self,
        settings: Settings,
        attempts: Attempts,
        contents: Contents,
        ledger: Ledger,
        window: Window,
        *,
        outcomes: Batches[Ended],
        returns: Batches[Returned],
    ) -> None:
        """
        Args:
            outcomes: Outbox: what is to be recorded. What this records as deferred comes back over `retry`.
            returns: Outbox: what is to be given back.
        """
        self._lease_seconds = settings.lease_seconds
        self._policy = RetryPolicy(settings.max_attempts, settings.retry_base_seconds, settings.retry_cap_seconds)
        self._attempts = attempts
        self._contents = contents
        self._ledger = ledger
        self._window = window
        self._outcomes = outcomes
        self._returns = returns
        self._loop = asyncio.get_running_loop()
        self._is_draining = False

    def add(self, email: InFlightEmail) -> None:
        """Begins the first attempt under a lease."""
        ride = self._attempts.begin(email)
        if ride is None:
            self._start(email)
        else:
            email.work = ride.outcome
            ride.outcome.add_done_callback(lambda _: self._end_ride(email, ride))

    def retry(self, email: InFlightEmail, seconds: float) -> None:
        """Makes the next attempt after so long; the deferral of the one before is recorded."""
        email.attempt_number += 1
        self._wait(email, seconds)

    def give_back(self, email: InFlightEmail, away_seconds: float = 0.0) -> None:
        """Gives back what nothing left of, or of which the provider says that it took nothing. Idempotent."""
        if email.may(Event.RETURN):
            email.on(Event.RETURN)
            self._returns.add(Returned(email, away_seconds))

    def stop(self, email: InFlightEmail) -> None:
        """Keeps an email from leaving, and gives it back once its attempt has noticed.

        An attempt that was cancelled before its first step notices nothing; neither does a timer.
        """
        email.on(Event.STOP)
        work = email.work
        assert work is not None, "an email that can be stopped is being prepared, or waits"
        work.cancel()
        if isinstance(work, asyncio.Task):
            work.add_done_callback(lambda _: self.give_back(email))
        elif not isinstance(work, asyncio.Future):
            self.give_back(email)

    def stop_all(self) -> None:
        """Begins to drain: stops all emails of which nothing has left."""
        self._is_draining = True
        for email in list(self._window.emails.values()):
            if email.may(Event.STOP):
                self.stop(email)

    async def finish(self, until: float) -> None:
        """Waits for what is on the wire, up to this instant of the loop's clock.

        What got no answer by then is concluded as uncertain.
        """
        while (left := until - self._loop.time()) > 0 and (work := self._work()):
            await asyncio.wait(work, timeout=left)
        for email in list(self._window.emails.values()):
            if email.state is State.ON_THE_WIRE:
                self._conclude(email, Uncertain("The worker had to stop before the provider answered."))
            else:
                self.give_back(email)  # its adapter is slow to notice

    def _work(self) -> list[asyncio.Future[object]]:
        """What the emails in hand wait for, but for their records."""
        works = [email.work for email in self._window.emails.values()]
        return [work for work in works if isinstance(work, asyncio.Future) and not work.done()]

    def _start(self, email: InFlightEmail, ride: Ride | None = None) -> None:
        email.work = self._loop.create_task(self._send(email, ride))  # half of what asyncio's own way costs

    def _end_ride(self, email: InFlightEmail, ride: Ride) -> None:
        """Concludes an email whose call has ended, where it was accepted; all else is for a task of its own."""
        email.work = None
        if (accepted := self._attempts.accepted(email, ride)) is None:
            self._start(email, ride)
            return
        try:
            self._conclude(email, accepted)
        except Exception as error:  # noqa: BLE001 - as in `_send`
            self._conclude(email, self._attempts.failed(email, error))

    async def _send(self, email: InFlightEmail, ride: Ride | None) -> None:
        """Makes one attempt.

        Args:
            ride: The attempt, where it is over already, and was not accepted.
        """
        try:
            await self._attempt(email, ride)
        except TryLater as later:
            self._wait(email, later.seconds)
        except (NoRoute, NoMemory) as error:
            self.give_back(email, error.away_seconds)
        except LeaseRanOut:
            self.give_back(email)
        except asyncio.CancelledError:
            if email.state is State.ON_THE_WIRE:  # the process ends: its ledger says so
                raise
            self.give_back(email)
        except Exception as error:  # noqa: BLE001 - an adapter's bug, such as an answer that is none
            # Nobody waits for this task: the email would be leased, and in the window, for as long as we live.
            self._conclude(email, self._attempts.failed(email, error))

    async def _attempt(self, email: InFlightEmail, ride: Ride | None) -> None:
        """Makes and concludes one attempt. Content that was not leased with its email is read for it."""
        if not email.lease.octets_apart:
            self._conclude(email, await self._attempts.make(email, ride))
            return
        async with self._contents.held(email) as fault:
            outcome = self._attempts.unreadable(email, fault) if fault else await self._attempts.make(email)
            self._conclude(email, outcome)

    def _wait(self, email: InFlightEmail, seconds: float) -> None:
        """Leaves the email for later, under its lease; others take its place meanwhile."""
        if self._is_draining or not email.may(Event.WAIT):
            self.give_back(email)
            return
        email.on(Event.WAIT)
        email.work = self._loop.call_later(seconds, self._resume, email)
        self._window.wake()

    def _resume(self, email: InFlightEmail) -> None:
        email.on(Event.RESUME)
        self._start(email)

    def _conclude(self, email: InFlightEmail, outcome: Outcome) -> None:
        """Writes the answer into the ledger, decides what it means, and passes it on to be recorded."""
        if not email.may(Event.ANSWER):
            return  # the drain ran out of time, and has concluded or given it back before the answer came
        finished_at = email.attempted_until
        if email.ledger_slot is not None:
            self._ledger.answered(email.ledger_slot, outcome, finished_at=finished_at)
        fails_over = self._attempts.may_fail_over(email, outcome)
        # What one provider asks us to wait is nothing to the next.
        judged = replace(outcome, retry_after=None) if fails_over and isinstance(outcome, Deferred) else outcome
        number = email.attempt_number - email.lease.attempt_base
        decision = decide(judged, number, email.policy, self._policy, random.random)
        retries = isinstance(decision, RetryIn)
        wait_seconds = decision.seconds if isinstance(decision, RetryIn) and not fails_over else 0.0
        if not (retries and fails_over):
            email.refused_by = frozenset()
        flight = Flight(
            email.lease.email_id,
            email.lease.token,
            email.attempt_number,
            email.provider,
            email.started_at,
            email.policy,
            finished_at,
        )
        lease_seconds = wait_seconds + self._lease_seconds if retries else None
        result = result_of(flight, outcome, decision, lease_seconds=lease_seconds)
        email.on(Event.ANSWER)
        self._outcomes.add(Ended(email, result, wait_seconds))
        report_attempt(email, outcome, result.status, finished_at)
