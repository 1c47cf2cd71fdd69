"""Checks and enqueues what clients submit, and words the replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from dispatcher.admission.access import Caller, KeyAccess
from dispatcher.admission.enqueueing import Enqueuer
from dispatcher.admission.fair_limiter import FairLimiter
from dispatcher.admission.off_loop import run_off_loop
from dispatcher.admission.problems import Problem
from dispatcher.admission.refusal_counter import RefusalCounter
from dispatcher.admission.validation import EmailValidator, refusal, require_enqueued
from dispatcher.config import Settings
from dispatcher.domain.api_key import Scope, Secret
from dispatcher.domain.email import Email
from dispatcher.domain.headers import is_reserved
from dispatcher.domain.raw_mime import has_long_line
from dispatcher.errors import DispatcherError, InvalidEmail, StoreBusy, StoreUnavailable
from dispatcher.producers import BATCH_OCTETS, Acceptance, Enqueued
from dispatcher.smtp_door.content import LONG_LINE
from dispatcher.smtp_door.guard import Guard
from dispatcher.smtp_door.message_key import Submission, key_of_recipient
from dispatcher.smtp_door.replies import of_problem
from dispatcher.store.address_hashes import normalised
from dispatcher.store.api_keys import ApiKey
from dispatcher.store.connections import Pool
from dispatcher.store.enqueueing import Draft, draft
from dispatcher.store.recipients import find_held_recipients
from dispatcher.telemetry.log import get_log
from dispatcher.telemetry.tracing import TRACER

MAX_HOPS: Final = 50
TOO_MANY_HOPS: Final = f"554 5.4.6 The message has more than {MAX_HOPS} Received headers: it goes in a circle."


class Refused(Exception):
    """Raised with the reply to the client."""


@dataclass(frozen=True, slots=True)
class Door:
    """What all connections of this process share."""

    settings: Settings
    access: KeyAccess
    validator: EmailValidator
    enqueuer: Enqueuer
    sessions: Pool
    guard: Guard
    sessions_per_key: FairLimiter
    memory: FairLimiter
    refusals: RefusalCounter

    async def log_in(self, secret: Secret | None, *, may_ask_database: bool) -> Caller:
        """The caller with this API key, who now has one session. Raises `Refused`."""
        key = None
        if secret is not None:
            try:
                key = await self.access.find(secret) if may_ask_database else self.access.find_known(secret)
            except StoreUnavailable:
                raise Refused("454 4.7.0 The database is unavailable. Retry later.") from None
        if key is None:
            text = "The password is not a valid API key. Use a key of `dispatcher keys create` as the password."
            raise Refused(f"535 5.7.8 {text}")
        if Scope.SEND not in key.scopes:
            raise Refused("535 5.7.8 The API key lacks the scope send. Use another key.")
        if key.tenant_id is None:
            raise Refused("535 5.7.8 The API key is for all tenants. Use a key of one tenant.")
        try:
            self.sessions_per_key.acquire(key.key_id)
        except Problem:
            raise Refused("454 4.7.0 This API key has too many sessions. Close some, or retry later.") from None
        return Caller(key, key.key_id)

    def begin_message(self, caller: Caller) -> None:
        """Counts a message against the rate of its key. Raises `Refused`."""
        try:
            self.access.charge(self._valid_key(caller))
        except Problem as problem:
            raise Refused(self.reply_of(problem)) from None

    def _valid_key(self, caller: Caller) -> ApiKey:
        """The caller's key. Raises `Refused` if it was revoked since the login."""
        assert caller.key is not None
        if (key := self.access.valid_key(caller.key.key_id)) is None:
            raise Refused("421 4.7.0 The API key was revoked. Log in with another key.")
        return key

    async def accept(self, caller: Caller, sender: str, recipients: Sequence[str], content: bytes) -> str:
        """The reply to a whole message; a 250 only if the message is committed for all its recipients."""
        try:
            self._valid_key(caller)
            with TRACER.enqueueing(None) as enqueueing:
                email_id, is_new = await self._enqueue(caller, sender, recipients, content, enqueueing.traceparent)
                enqueueing.note(1, email_id)
        except Refused as refused:
            self.refusals.count("invalid-email")
            return str(refused)
        except Exception as error:  # noqa: BLE001 - the client needs a reply, whatever failed
            return self.reply_of(error)
        return f"250 2.0.0 OK, {'queued' if is_new else 'queued before'} as {email_id}"

    def reply_of(self, error: Exception) -> str:
        """The reply to a client for what has failed. Counts it."""
        match error:
            case Problem():
                problem = error
            case InvalidEmail():
                problem = refusal([error], "")
            case StoreBusy():
                problem = Problem("overloaded", "Retry later.")
            case StoreUnavailable():
                problem = Problem("database-unavailable", "Retry: a message that was stored is not stored again.")
            case _:
                reason = error.message if isinstance(error, DispatcherError) else type(error).__name__
                get_log().error("error.unexpected", where="smtp", error=reason)
                problem = Problem("internal-error", "Retry later. The cause is in the server's log (error.unexpected).")
        self.refusals.count(problem.code)
        return of_problem(problem)

    async def _enqueue(
        self, caller: Caller, sender: str, recipients: Sequence[str], content: bytes, traceparent: str | None
    ) -> tuple[UUID, bool]:
        """Enqueues a message for those of its recipients for whom it was not enqueued. Returns the id of an email of
        the message, and whether this call has enqueued one."""

        def read() -> tuple[Submission, bool, Draft]:
            if has_long_line(content):
                raise Refused(LONG_LINE)
            message = Submission(content)
            if len(message.values("received")) > MAX_HOPS:
                raise Refused(TOO_MANY_HOPS)
            name = message.name(sender)
            return message, name.is_given, self._draft(caller, recipients, message, name.message_key, traceparent)

        message, is_given, item = await run_off_loop(len(content), read)
        (answer,) = await self.enqueuer.enqueue([item], caller)
        if isinstance(answer, Enqueued) and answer.acceptance in (Acceptance.KNOWN, Acceptance.CONFLICT):
            is_same = answer.acceptance is Acceptance.KNOWN
            held = await find_held_recipients(self.sessions, answer.email_id, [normalised(each) for each in recipients])
            missing = [each for each in recipients if normalised(each) not in held]
            # Another message may have the same Message-ID if no recipient gets both. A given key names one message.
            if not is_same and not is_given and len(missing) == len(recipients):
                is_same = True
            if is_same and missing:
                return await self._enqueue_missing(caller, missing, message, item, traceparent)
        return require_enqueued(answer).email_id, answer.acceptance is Acceptance.ACCEPTED  # type: ignore[union-attr]

    async def _enqueue_missing(
        self, caller: Caller, missing: Sequence[str], message: Submission, first: Draft, traceparent: str | None
    ) -> tuple[UUID, bool]:
        """Enqueues an email for each recipient: its key names the message and the recipient, so it is unique however a
        client regroups the recipients (docs/decisions/0092-smtp-door.md). Each has a copy of the content, so a few at
        a time are in memory."""

        def read(some: Sequence[str]) -> list[Draft]:
            keys = [(key_of_recipient(first.email.message_key, normalised(each)), each) for each in some]
            return [self._draft(caller, [address], message, key, traceparent) for key, address in keys]

        enqueued: list[Enqueued] = []
        at_once = max(1, BATCH_OCTETS // len(message.content))
        for start in range(0, len(missing), at_once):
            some = missing[start : start + at_once]
            drafts = await run_off_loop(len(message.content) * len(some), partial(read, some))
            enqueued += [require_enqueued(answer) for answer in await self.enqueuer.enqueue(drafts, caller)]
        return enqueued[0].email_id, any(each.acceptance is Acceptance.ACCEPTED for each in enqueued)

    def _draft(
        self, caller: Caller, recipients: Sequence[str], message: Submission, key: str, traceparent: str | None
    ) -> Draft:
        email = Email.from_mime(
            # Mail programs add headers on their own, so those that the policy does not allow are left out, not refused.
            message.with_headers(lambda name: is_reserved(name) or self.validator.policy.allows_header(name)),
            message_key=key,
            recipients=recipients,
            tenant_id=caller.tenant(None),
            allowed_headers=self.settings.allowed_provider_headers,
        )
        self.validator.check(email, caller)
        return draft([email], traceparent, caller.lane, is_test=caller.is_test)[0]._replace(
            payload_hash=message.fingerprint(is_test=caller.is_test)
        )
