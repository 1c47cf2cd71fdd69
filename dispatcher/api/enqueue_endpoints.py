"""The endpoints that enqueue emails: one, or a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl, Caller
from dispatcher.api.body_reader import BodyReader, run_off_loop
from dispatcher.api.insert_batcher import InsertBatcher, InsertResult
from dispatcher.api.large_json import parse
from dispatcher.api.problems import Problem
from dispatcher.api.quotas import QuotaExhausted
from dispatcher.api.refusal_counter import RefusalCounter
from dispatcher.api.validation import EmailValidator, batch_items, idempotency_key, require_enqueued, require_key
from dispatcher.domain.api_key import Scope
from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.message import Message
from dispatcher.domain.sms import SMS_CHANNEL
from dispatcher.domain.status import Status
from dispatcher.producers import Acceptance, Enqueued
from dispatcher.store.drafts import DraftStore
from dispatcher.store.enqueueing import Draft, draft
from dispatcher.telemetry.tracing import TRACER


@dataclass(frozen=True, slots=True)
class EnqueueEndpoints:
    """Validates emails, charges quotas, and enqueues the emails through the insert batcher."""

    access: AccessControl
    bodies: BodyReader
    validator: EmailValidator
    batcher: InsertBatcher
    store: DraftStore
    refusals: RefusalCounter

    async def create(self, request: Request) -> Response:
        """Enqueues one email. The email is committed before the response is sent."""
        return await self._create(request, {})

    async def create_sms(self, request: Request) -> Response:
        """Enqueues one SMS. The SMS is committed before the response is sent."""
        return await self._create(request, {"channel": SMS_CHANNEL})

    async def _create(self, request: Request, kind: Mapping[str, str]) -> Response:
        caller = await self.access.authenticate(request, Scope.SEND)
        key = idempotency_key(request)
        with TRACER.enqueueing(request.headers.get("traceparent")) as enqueueing:
            async with self.bodies.read(request, caller.name) as body:
                made = await run_off_loop(
                    len(body), lambda: self._draft(body, kind, caller, key, enqueueing.traceparent)
                )
                answer = (await self._enqueue([made], caller))[0]
            email = require_enqueued(answer)
            enqueueing.note(1, email.email_id)
        headers = {"Location": f"/v1/emails/{email.email_id}"}
        if email.acceptance is Acceptance.KNOWN:
            headers["Idempotent-Replayed"] = "true"
        return Response(orjson.dumps(accepted(email, made.email)), 202, headers, "application/json")

    def _draft(
        self, body: bytearray, kind: Mapping[str, str], caller: Caller, key: str | None, traceparent: str | None
    ) -> Draft:
        document = parse(body)
        if kind and isinstance(document, dict):
            document = {**document, **kind}
        require_key(document, key)
        email = self.validator.email(document, caller, key=key)
        return draft([email], traceparent, caller.lane)[0]

    async def create_many(self, request: Request) -> Response:
        """Enqueues up to 1,000 emails. Each email gets its own result, in the request's order."""
        caller = await self.access.authenticate(request, Scope.SEND)
        with TRACER.enqueueing(request.headers.get("traceparent")) as enqueueing:
            async with self.bodies.read(request, caller.name) as body:
                traceparent = enqueueing.traceparent
                made = await run_off_loop(
                    len(body), lambda: self._drafts(batch_items(parse(body)), caller, traceparent)
                )
                self.access.charge_batch(caller.key, len(made) - 1)  # `authenticate` has charged the first email
                drafts = [item for item in made if isinstance(item, Draft)]
                answers = iter(await self._enqueue(drafts, caller) if drafts else [])
                enqueueing.note(len(drafts))
        results = [
            self._accepted(next(answers), item, index) if isinstance(item, Draft) else self._refused(item)
            for index, item in enumerate(made)
        ]
        return Response(orjson.dumps({"results": results}), 200, media_type="application/json")

    def _drafts(self, documents: Sequence[object], caller: Caller, traceparent: str | None) -> list[Draft | Problem]:
        made: list[Message | Problem] = []
        for index, document in enumerate(documents):
            try:
                made.append(self.validator.email(document, caller, prefix=f"/emails/{index}"))
            except Problem as problem:
                made.append(problem.without_traceback())
        drafts = iter(draft([item for item in made if not isinstance(item, Problem)], traceparent, caller.lane))
        return [item if isinstance(item, Problem) else next(drafts) for item in made]

    def _accepted(self, answer: InsertResult, item: Draft, index: int) -> dict[str, Any]:
        try:
            email = require_enqueued(answer, f"/emails/{index}")
        except Problem as problem:
            return self._refused(problem)
        outcome = "accepted" if email.acceptance is Acceptance.ACCEPTED else "known"
        return {"outcome": outcome, "email": accepted(email, item.email)}

    def _refused(self, problem: Problem) -> dict[str, Any]:
        self.refusals.count(problem.code)
        return {"outcome": "refused", "problem": problem.document()}

    async def _enqueue(self, drafts: Sequence[Draft], caller: Caller) -> list[InsertResult]:
        """Enqueues all drafts (prepared emails), if enough of the key's quota is left.

        Reserves all recipients from the quota, and gives back the recipients of drafts that were not inserted: refused
        drafts, and repeated requests.

        Raises:
            Problem: `quota-exceeded`.
        """
        recipients = sum(recipients_of(item.email) for item in drafts)
        reservation = await self.access.quotas.reserve(caller.key, recipients)
        if isinstance(reservation, QuotaExhausted):
            return await self._enqueue_known(drafts, reservation)
        answers = await self.batcher.enqueue(drafts)
        unused = sum(
            recipients_of(item.email)
            for item, answer in zip(drafts, answers, strict=True)
            if not (isinstance(answer, Enqueued) and answer.acceptance is Acceptance.ACCEPTED)
        )
        await self.access.quotas.return_unused(reservation, unused)
        return answers

    async def _enqueue_known(self, drafts: Sequence[Draft], quota: QuotaExhausted) -> list[InsertResult]:
        """Handles a request whose key has too little quota left.

        A repeated request needs no quota: if earlier requests have enqueued all drafts, returns their results.

        Raises:
            Problem: `quota-exceeded`: at least one draft is new.
        """
        known = await self.store.find(drafts)
        found = [known.get(item.key) == item.payload_hash for item in drafts]
        if not all(found):
            detail = (
                "The request has more recipients than the API key may still use today (UTC). The next day begins in "
                f"{quota.retry_after:,} s."
            )
            raise Problem("quota-exceeded", detail, retry_after=quota.retry_after)
        return await self.batcher.enqueue(drafts)


def accepted(enqueued: Enqueued, email: Message) -> dict[str, Any]:
    """The response for an enqueued email.

    A repeated request gets the same response, even if the email's status has changed.
    """
    status = Status.PENDING if email.send_at is None else Status.WAITING
    warnings = {"warnings": email.warnings} if email.warnings else {}
    return {"id": enqueued.email_id, "message_key": enqueued.message_key, "status": status, **warnings}
