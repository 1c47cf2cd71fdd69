"""The endpoints that take emails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import Access, Caller
from dispatcher.api.bodies import Bodies, off_loop
from dispatcher.api.gathering import Answer, Gathering
from dispatcher.api.intake import Intake, check_named, idempotency_key, listed, stored
from dispatcher.api.large_json import parsed
from dispatcher.api.problems import Problem
from dispatcher.api.quotas import UsedUp
from dispatcher.api.refusals import Refusals
from dispatcher.domain.api_key import Scope
from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.email import Email
from dispatcher.domain.status import Status
from dispatcher.producers import Acceptance, Enqueued
from dispatcher.store.drafts import DraftStore
from dispatcher.store.enqueueing import Draft, draft
from dispatcher.telemetry.tracing import TRACER


@dataclass(frozen=True, slots=True)
class Emails:
    """Takes emails, one or many."""

    access: Access
    bodies: Bodies
    intake: Intake
    gathering: Gathering
    store: DraftStore
    refusals: Refusals

    async def create(self, request: Request) -> Response:
        """Enqueues one email: durable when the answer says so, sent by `dispatcher run`."""
        caller = await self.access.caller(request, Scope.SEND)
        key = idempotency_key(request)
        with TRACER.enqueueing(request.headers.get("traceparent")) as enqueueing:
            async with self.bodies.read(request, caller) as body:
                made = await off_loop(len(body), lambda: self._draft(body, caller, key, enqueueing.traceparent))
                answer = (await self._enqueue([made], caller))[0]
            email = stored(answer)
            enqueueing.note(1, email.email_id)
        headers = {"Location": f"/v1/emails/{email.email_id}"}
        if email.acceptance is Acceptance.KNOWN:
            headers["Idempotent-Replayed"] = "true"
        return Response(orjson.dumps(accepted(email)), 202, headers, "application/json")

    def _draft(self, body: bytearray, caller: Caller, key: str | None, traceparent: str | None) -> Draft:
        document = parsed(body)
        check_named(document, key)
        email = self.intake.email(document, caller, key=key)
        return draft([email], traceparent)[0]

    async def create_many(self, request: Request) -> Response:
        """Enqueues up to a thousand emails; each gets its own answer, in their order."""
        caller = await self.access.caller(request, Scope.SEND)
        with TRACER.enqueueing(request.headers.get("traceparent")) as enqueueing:
            async with self.bodies.read(request, caller) as body:
                traceparent = enqueueing.traceparent
                made = await off_loop(len(body), lambda: self._drafts(listed(parsed(body)), caller, traceparent))
                self.access.charge(caller.key, len(made) - 1)
                drafts = [item for item in made if isinstance(item, Draft)]
                answers = iter(await self._enqueue(drafts, caller) if drafts else [])
                enqueueing.note(len(drafts))
        results = [self._result(next(answers) if isinstance(item, Draft) else item) for item in made]
        return Response(orjson.dumps({"results": results}), 200, media_type="application/json")

    def _drafts(self, documents: Sequence[object], caller: Caller, traceparent: str | None) -> list[Draft | Problem]:
        made: list[Email | Problem] = []
        for index, document in enumerate(documents):
            try:
                made.append(self.intake.email(document, caller, below=f"/emails/{index}"))
            except Problem as problem:
                made.append(problem.alone())
        drafts = iter(draft([item for item in made if isinstance(item, Email)], traceparent))
        return [next(drafts) if isinstance(item, Email) else item for item in made]

    def _result(self, answer: Answer | Problem) -> dict[str, Any]:
        try:
            email = answer if isinstance(answer, Problem) else stored(answer)
        except Problem as problem:
            email = problem.alone()
        if isinstance(email, Problem):
            self.refusals.count(email.code)
            return {"outcome": "refused", "problem": email.document()}
        outcome = "accepted" if email.acceptance is Acceptance.ACCEPTED else "known"
        return {"outcome": outcome, "email": accepted(email)}

    async def _enqueue(self, drafts: Sequence[Draft], caller: Caller) -> list[Answer]:
        """Enqueues what the caller's quota still has room for.

        Raises:
            Problem: it has no room for these.
        """
        recipients = sum(recipients_of(item.email) for item in drafts)
        taken = await self.access.quotas.take(caller.key, recipients)
        if isinstance(taken, UsedUp):
            return await self._replay(drafts, taken)
        answers = await self.gathering.enqueue(drafts)
        unused = sum(
            recipients_of(item.email)
            for item, answer in zip(drafts, answers, strict=True)
            if not (isinstance(answer, Enqueued) and answer.acceptance is Acceptance.ACCEPTED)
        )
        await self.access.quotas.give_back(taken, unused)
        return answers

    async def _replay(self, drafts: Sequence[Draft], quota: UsedUp) -> list[Answer]:
        """What was enqueued before is answered as before, without any quota."""
        known = await self.store.find(drafts)
        found = [known.get(item.key) == item.payload_hash for item in drafts]
        if not all(found):
            raise Problem("quota-exceeded", retry_after=quota.retry_after)
        return await self.gathering.enqueue(drafts)


def accepted(email: Enqueued) -> dict[str, Any]:
    """What is said of an email that was accepted: the same for every repetition, whatever became of it meanwhile."""
    return {"id": email.email_id, "message_key": email.message_key, "status": Status.PENDING}
