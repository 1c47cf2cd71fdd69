"""The send stage: leased emails → outcomes, one email at a time.

    leased ─▶ an attempt, with a task or without it ─▶ outcome ─▶ decision ─▶ record stage
                 │ retry later: waits under the same lease, then     (a deferral returns through `retry`)
                 │   the lease is renewed (returns through `resume`)
                 └▶ not sent: release stage

An attempt needs no task if it need not wait before its first byte: its email joins a bulk call, or a connection to the
provider is idle. Nearly all emails are accepted, and a callback handles the answer when it arrives. Whatever else
happens is handled by a task.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from dispatcher.config import Settings
from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.decision import RetryIn, decide
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain, of_whole_email
from dispatcher.domain.outgoing import EMAIL_CHANNEL, OutgoingEmail, without_recipients
from dispatcher.domain.raw_mime import fields_of, head_of
from dispatcher.domain.retry import RetryPolicy
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_format import InFlightAttempt
from dispatcher.routing.domain_gates import DomainFull
from dispatcher.store.address_hashes import AddressHasher, normalised
from dispatcher.store.leases import DomainWait
from dispatcher.store.results import result_of
from dispatcher.worker.attempts import Attempts, BegunAttempt, NoRoute, TryLater
from dispatcher.worker.contents import ContentLoader, NoMemory
from dispatcher.worker.in_flight_email import (
    EmailEvent,
    EmailState,
    EndedAttempt,
    InFlightEmail,
    LeaseExpired,
    ReleaseRequest,
)
from dispatcher.worker.report import report_attempt
from dispatcher.worker.suppression import SuppressedRecipients
from dispatcher.worker.window import Window

LIST_UNSUBSCRIBE: Final = "List-Unsubscribe"
ONE_CLICK: Final = {"List-Unsubscribe-Post": "List-Unsubscribe=One-Click"}


class SendStage:
    """Sends leased emails, and retries deferred emails, until each email has a final outcome or is released."""

    def __init__(
        self,
        settings: Settings,
        attempts: Attempts,
        contents: ContentLoader,
        suppressed: SuppressedRecipients,
        ledger: Ledger,
        window: Window,
        *,
        outcomes: BatchQueue[EndedAttempt],
        releases: BatchQueue[ReleaseRequest],
        retries: BatchQueue[InFlightEmail],
    ) -> None:
        self._lease_seconds = settings.lease_seconds
        self._policy = RetryPolicy(settings.max_attempts, settings.retry_base_seconds, settings.retry_cap_seconds)
        self._attempts = attempts
        self._contents = contents
        self._suppressed = suppressed
        url, senders = settings.unsubscribe_url, settings.unsubscribe_senders
        self._unsubscribe = UnsubscribeHeaders(url, senders) if url and senders else None
        self._ledger = ledger
        self._window = window
        self._outcomes = outcomes
        self._releases = releases
        self._retries = retries
        self._loop = asyncio.get_running_loop()
        self._is_draining = False

    def add(self, email: InFlightEmail) -> None:
        """Begins the first attempt of an email under its lease. During a drain, releases the email instead."""
        if self._is_draining:
            self.release(email)
            return
        try:
            begun = self._begin(email) if self._attempts.can_begin else None
        except Exception:  # noqa: BLE001 - nothing was sent; `_send` gets the same error, and handles it
            begun = None
        if begun is None:
            self._start(email)
        else:
            email.work = begun.outcome
            begun.outcome.add_done_callback(lambda _: self._end(email, begun))

    def retry(self, email: InFlightEmail, seconds: float) -> None:
        """Schedules the next attempt. Call this after the deferral is recorded."""
        email.attempt_number += 1
        self._wait(email, seconds)

    def resume(self, email: InFlightEmail) -> None:
        """Begins an attempt after a wait. Call this after the lease is confirmed."""
        email.on(EmailEvent.RESUME)
        self._start(email)

    def release(self, email: InFlightEmail, delay_seconds: float = 0.0, wait: DomainWait | None = None) -> None:
        """Releases an email that was not sent, or that is known not to be accepted. Idempotent."""
        if email.may(EmailEvent.RELEASE):
            email.on(EmailEvent.RELEASE)
            self._releases.add(ReleaseRequest(email, delay_seconds, wait))

    def stop(self, email: InFlightEmail) -> None:
        """Prevents an email from being sent, and releases the email when its attempt has ended, even if its task is
        cancelled before the first step. An email that waits for a timer is due when its wait would have ended."""
        email.on(EmailEvent.STOP)
        work = email.work
        assert work is not None, "an email that can be stopped has a task, a bulk call or a timer"
        work.cancel()
        if isinstance(work, asyncio.Task):
            work.add_done_callback(lambda _: self.release(email))
        elif isinstance(work, asyncio.TimerHandle):
            self.release(email, max(0.0, work.when() - self._loop.time()))

    def stop_all(self) -> None:
        """Begins to drain: stops all emails that are not on the wire."""
        self._is_draining = True
        for email in list(self._window.emails.values()):
            if email.may(EmailEvent.STOP):
                self.stop(email)

    async def finish(self, until: float) -> None:
        """Waits for the answers to emails on the wire, until `until` (the loop's clock). The others become
        uncertain."""
        while (left := until - self._loop.time()) > 0 and (work := self._work()):
            await asyncio.wait(work, timeout=left)
        for email in list(self._window.emails.values()):
            if email.state is EmailState.ON_THE_WIRE:
                self._conclude(email, Uncertain("The worker had to stop before the provider answered."))
            else:
                self.release(email)  # `stop_all` stopped the email, but its task has not ended yet

    def _work(self) -> list[asyncio.Future[object]]:
        """The pending tasks, and the attempts without a task that `_end` has not handled yet."""
        works = [email.work for email in self._window.emails.values()]
        futures = [work for work in works if isinstance(work, asyncio.Future)]
        return [work for work in futures if not (isinstance(work, asyncio.Task) and work.done())]

    def _start(self, email: InFlightEmail, begun: BegunAttempt | None = None) -> None:
        email.work = self._loop.create_task(self._send(email, begun))  # takes half as long as asyncio.create_task

    def _begin(self, email: InFlightEmail) -> BegunAttempt | None:
        """Begins an attempt without a task; None if the email needs a task."""
        content = email.content
        if content is None or email.lease.recipient_outcomes:
            return None
        if self._suppressed.may_concern(content, email.lease.tenant_id, email.lease.topic):
            return None
        self._add_headers(email)
        return self._attempts.begin(email)

    def _end(self, email: InFlightEmail, begun: BegunAttempt) -> None:
        """Queues the result of an accepted email when its attempt has ended. Starts a task for any other outcome."""
        email.work = None
        if (accepted := self._attempts.accepted(email, begun)) is None:
            self._start(email, begun)
            return
        try:
            self._conclude(email, accepted)
        except Exception as error:  # noqa: BLE001 - handled like an error in `_send`
            self._conclude(email, self._attempts.failed(email, error))

    async def _send(self, email: InFlightEmail, begun: BegunAttempt | None) -> None:
        """Makes one attempt to send an email. If the email was not sent, releases it or lets it wait."""
        try:
            await self._attempt(email, begun)
        except TryLater as later:
            self._wait(email, later.seconds)
        except (NoRoute, NoMemory) as error:
            self.release(email, error.delay_seconds)
        except DomainFull as full:
            wait = DomainWait(full.domain, email.delivery.lane, email.lease.tenant_id, full.pace)
            self.release(email, wait=wait)
        except LeaseExpired:
            self.release(email)
        except asyncio.CancelledError:
            if email.state is EmailState.ON_THE_WIRE:  # the process exits, and the relay settles the ledger
                raise
            self.release(email)
        except Exception as error:  # noqa: BLE001 - an adapter's bug, such as an invalid outcome
            # No code awaits this task, so handle every error here. Otherwise, the email would stay leased until the
            # process exits.
            self._conclude(email, self._attempts.failed(email, error))

    async def _attempt(self, email: InFlightEmail, begun: BegunAttempt | None) -> None:
        """Makes one attempt and handles its outcome. Reads the content first if the lease does not contain it."""
        if begun is not None:
            self._conclude(email, await self._make(email, begun))
            return
        if not email.lease.octets_apart:
            email.content = email.lease.email
            self._conclude(email, await self._send_to_others(email))
            return
        async with self._contents.loaded(email) as fault:
            outcome = self._attempts.unreadable(email, fault) if fault else await self._send_to_others(email)
            self._conclude(email, outcome)

    async def _send_to_others(self, email: InFlightEmail) -> Outcome:
        """Makes one attempt without the suppressed recipients, and those who need no further attempt."""
        email.suppressed = None
        content, done, is_redirected = email.content, email.lease.recipient_outcomes, False
        topic = email.lease.topic
        if content is not None and (
            (may_concern := self._suppressed.may_concern(content, email.lease.tenant_id, topic)) or done
        ):
            if may_concern and not done:
                is_redirected = (redirected := self._suppressed.redirected(content)) is not content
                content = redirected
            found = await self._suppressed.find(content, topic) if may_concern else {}
            suppressed = {position: why for position, why in found.items() if position not in done}
            shown = without_recipients(content, suppressed)
            email.content = without_recipients(content, {**suppressed, **done})
            is_left = recipients_of(email.content) > 0
            if is_left or done:
                email.suppressed = suppressed
            if not is_left:
                return self._attempts.suppressed(email, suppressed)
            if done:
                email.content = replace(email.content, shown=(shown.to, shown.cc))
        self._add_headers(email)
        outcome = await self._make(email)
        if is_redirected and isinstance(outcome, Accepted):
            return replace(outcome, detail="redirected to DISPATCHER_REDIRECT_TO")
        return outcome

    async def _make(self, email: InFlightEmail, begun: BegunAttempt | None = None) -> Outcome:
        outcome = await self._attempts.make(email, begun)
        if isinstance(outcome, Rejected) and outcome.reason is Reason.OPTED_OUT and email.content is not None:
            await self._suppressed.opt_out(email.content)
        return outcome

    def _add_headers(self, email: InFlightEmail) -> None:
        hasher = self._suppressed.hasher
        if self._unsubscribe is not None and email.content is not None and hasher is not None:
            email.content = self._unsubscribe.added_to(email.content, hasher)

    def _wait(self, email: InFlightEmail, seconds: float) -> None:
        """Retries the email after `seconds`, under the same lease, outside the window. Releases it instead if the
        worker drains, too many emails wait, or it expires before: the relay then cancels it in time."""
        may_wait = not seconds or self._window.may_wait
        expires_first = steady_clock() + seconds >= email.expires_at
        if self._is_draining or expires_first or not (may_wait and email.may(EmailEvent.WAIT)):
            self.release(email, seconds)
            return
        email.on(EmailEvent.WAIT)
        email.work = self._loop.call_later(seconds, self._retries.add, email)
        self._window.wake()

    def _conclude(self, email: InFlightEmail, outcome: Outcome) -> None:
        """Writes the answer into the ledger, decides the next step, and passes the result to the record stage."""
        if not email.may(EmailEvent.ANSWER):
            return  # the drain timed out before this answer: the email is already uncertain or released
        lease = email.lease
        done = lease.recipient_outcomes
        if email.suppressed or done or isinstance(outcome, Deferred):
            suppressed, content = email.suppressed or {}, email.content
            enqueued = 0 if content is None else recipients_of(content) + len(suppressed) + len(done)
            outcome = of_whole_email(outcome, enqueued, suppressed, done, is_in_doubt=email.pin is not None)
        ended_at = email.attempted_until
        if email.ledger_slot is not None:
            self._ledger.mark_answered(email.ledger_slot, outcome, finished_at=ended_at)
        judged, fails_over = outcome, False
        if isinstance(outcome, Deferred) and (fails_over := self._attempts.may_fail_over(email, outcome)):
            # The wait that one provider requests does not apply to the next provider.
            judged = replace(outcome, retry_after=None)
        number = email.attempt_number - lease.attempt_base
        pin, key_seconds = self._attempts.pin_of(email, outcome) or (None, None)
        decision = decide(
            judged,
            number,
            email.policy,
            self._policy,
            random.random,
            key_seconds=key_seconds,
            limits=email.limits,
            failovers=email.failovers,
        )
        if isinstance(outcome, Deferred) and outcome.partial is not None and outcome.partial.has_progress:
            codes = outcome.partial.codes
            email.lease = lease._replace(attempt_base=email.attempt_number, recipient_outcomes=codes)
        retries = isinstance(decision, RetryIn)
        email.pin = pin if retries else None
        wait_seconds = decision.seconds if isinstance(decision, RetryIn) and not fails_over else 0.0
        if retries and fails_over:
            email.failovers += 1
        else:
            email.failovers, email.refused_by = 0, frozenset()
        attempt = InFlightAttempt(
            lease.email_id, lease.token, email.attempt_number, email.provider, email.started_at, email.policy, ended_at
        )
        lease_seconds = wait_seconds + self._lease_seconds if retries else None
        result = result_of(attempt, outcome, decision, lease_seconds=lease_seconds, is_pinned=pin is not None)
        email.on(EmailEvent.ANSWER)
        self._outcomes.add(EndedAttempt(email, result, wait_seconds))
        report_attempt(email, outcome, result.status, ended_at)


class UnsubscribeHeaders:
    """Adds the headers with which recipients can unsubscribe by one click in a mail program (RFC 8058), to emails from
    the configured senders."""

    def __init__(self, url: str, senders: Collection[str]) -> None:
        self._prefix = f"{url.rstrip('/')}/v1/unsubscribe/"
        self._senders = frozenset(normalised(sender) for sender in senders)

    def added_to(self, email: OutgoingEmail, hasher: AddressHasher) -> OutgoingEmail:
        """The email with the headers. Unchanged if its sender is not one of `senders`, it has or had several
        recipients, the application has set a List-Unsubscribe header, or it is an SMS. The headers precede those of a
        raw email, so a signature of the application stays valid."""
        if email.channel != EMAIL_CHANNEL or email.shown is not None:
            return email
        sender = normalised(email.sender)
        if sender not in self._senders and sender.rpartition("@")[2] not in self._senders:
            return email
        names: Collection[str] = email.headers
        if email.raw is not None:
            fields = list(fields_of(head_of(email.raw)))
            names = [name for name, _ in fields]
            if any(name == "dkim-signature" and b"list-unsubscribe" in field.lower() for name, field in fields):
                return email  # the signature says that there is no such header, and would break
        if recipients_of(email) != 1 or any(name.lower() == LIST_UNSUBSCRIBE.lower() for name in names):
            return email
        (address,) = (*email.to, *email.cc, *email.bcc)
        url = self._prefix + hasher.unsubscribe_token(email.email_id, address)
        return replace(email, headers={**email.headers, LIST_UNSUBSCRIBE: f"<{url}>", **ONE_CLICK})
