"""The operations that enqueue emails, one or a batch, and what the OpenAPI document says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.admission.access import Caller
from dispatcher.admission.enqueueing import Enqueuer
from dispatcher.admission.insert_batcher import InsertResult
from dispatcher.admission.off_loop import run_off_loop
from dispatcher.admission.problems import Problem
from dispatcher.admission.refusal_counter import RefusalCounter
from dispatcher.admission.validation import KEY_HEADER, KEY_PATTERN, EmailValidator, require_enqueued
from dispatcher.api.access import AccessControl
from dispatcher.api.body_reader import BodyReader
from dispatcher.api.large_json import parse
from dispatcher.api.operation import BODY_PROBLEMS, ID, Operation, object_schema, reference
from dispatcher.api.validation import MAX_BATCH_EMAILS, batch_items, idempotency_key, require_key
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email import Email
from dispatcher.domain.message import SHARED_SCHEMAS, Message, list_schema, text_schema
from dispatcher.domain.phone import NUMBER_PATTERN
from dispatcher.domain.sms import SMS_CHANNEL, Sms
from dispatcher.domain.status import Status
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.producers import Acceptance, Enqueued
from dispatcher.store.enqueueing import Draft, draft
from dispatcher.telemetry.tracing import TRACER

SMS_EXAMPLE: Final[dict[str, Any]] = {"to": "+4915112345678", "text": "4711 is your code."}
EXAMPLE: Final[dict[str, Any]] = {
    "from": "Shop <shop@example.com>",
    "to": ["ann@example.org"],
    "subject": "Your receipt",
    "text": "Thank you for your order.",
}

_NUMBER: Final = "The recipient's number in E.164, such as `+4915112345678`."
_NUMBER_SCHEMA: Final = text_schema(40, 3, pattern=NUMBER_PATTERN)
_SENDER: Final = "A number, a short code, a name or a pool of senders. Default: the provider's setting."
_NEEDS: Final = {
    "anyOf": [{"required": ["from", "subject"]}, {"required": ["from", "template_id"]}, {"required": ["raw"]}]
}
_ENVELOPE: Final = Email.by_json_name["to"].kind.schema["anyOf"]
RECIPIENTS: Final[dict[str, Any]] = {
    "recipients": {
        "anyOf": [*_ENVELOPE, {"type": "null"}],
        "description": "Only with `raw`: who gets the email. Default: the addresses in its To, Cc and Bcc.",
    }
}
SCHEMAS: Final[dict[str, Any]] = {
    **SHARED_SCHEMAS,
    # The key of a single email may be in the header Idempotency-Key instead.
    "Email": {**Email.schema([], **RECIPIENTS), **_NEEDS, "examples": [EXAMPLE]},
    "KeyedEmail": {
        **Email.schema(["message_key"], **RECIPIENTS),
        **_NEEDS,
        "examples": [{"message_key": "order-17-receipt", **EXAMPLE}],
    },
    "Sms": {
        **Sms.schema(
            ["to", "text"],
            **{
                "channel": {"anyOf": [{"const": SMS_CHANNEL}, {"type": "null"}]},
                "to": {**list_schema(_NUMBER_SCHEMA, 1, minItems=1), "description": _NUMBER},
                "from": {"anyOf": [text_schema(40), {"type": "null"}], "description": _SENDER},
                "text": text_schema(Sms.max_characters, 1, description="The text."),
            },
        ),
        "examples": [SMS_EXAMPLE],
    },
    "Batch": object_schema(
        {"emails": {"type": "array", "minItems": 1, "maxItems": MAX_BATCH_EMAILS, "items": reference("KeyedEmail")}}
    ),
    "Accepted": object_schema(
        {
            "id": ID,
            "message_key": {"type": "string"},
            "status": {"type": "string", "enum": ["pending", "waiting"]},
            "warnings": {"type": "array", "items": {"type": "string"}},
            "is_test": {"const": True, "description": "The key is a test key: the email never leaves."},
        },
        "warnings",
        "is_test",
    ),
    "Result": {
        "oneOf": [
            object_schema({"outcome": {"enum": ["accepted", "known"]}, "email": reference("Accepted")}),
            object_schema({"outcome": {"const": "refused"}, "problem": reference("Problem")}),
        ]
    },
    "Results": object_schema({"results": {"type": "array", "items": reference("Result")}}),
}
MAX_BATCH_MISTAKES: Final = 200
"""After so many mistakes, a batch's other emails are refused for their first mistake only. A search for all mistakes
takes longer than a valid email."""
_TRACEPARENT: Final = {
    "name": "traceparent",
    "in": "header",
    "schema": {"type": "string"},
    "description": "W3C trace context; passed on to the message and the log.",
}
_KEY: Final = {
    "name": KEY_HEADER,
    "in": "header",
    "schema": {"type": "string", "pattern": KEY_PATTERN},
    "description": "Your unique name for the email. A repeated key never creates a second email. "
    f"1 to {MAX_KEY_CHARACTERS} printable ASCII characters, with or without double quotes. Required unless the body "
    "has `message_key`, which may also contain printable characters beyond ASCII.",
    "example": "order-17-receipt",
}
CREATE: Final = Operation(
    name="create_email",
    summary="Enqueue an email",
    description="The API responds after the email is committed. A repeated request creates no second email: the "
    "response is the same, with the header `Idempotent-Replayed: true`.",
    status=202,
    response_schema="Accepted",
    request_schema="Email",
    example=EXAMPLE,
    schemas=SCHEMAS,
    parameters=(_KEY, _TRACEPARENT),
    problems=(
        *("idempotency-key-missing", "idempotency-key-invalid", "idempotency-key-in-use", "idempotency-key-reused"),
        *BODY_PROBLEMS,
        *("invalid-email", "email-not-allowed", "no-capable-provider", "sender-forbidden", "lane-forbidden"),
        "quota-exceeded",
    ),
    headers={
        "Location": {"schema": {"type": "string"}, "description": "The path of the email's status.", "required": True},
        "Idempotent-Replayed": {
            "schema": {"type": "string", "enum": ["true"]},
            "description": "An earlier request already enqueued this email.",
        },
    },
)
CREATE_SMS: Final = replace(
    CREATE,
    name="create_sms",
    summary="Enqueue an SMS",
    description="Works as for an email. `warnings` in the response report a number that no telephone company is "
    "known to assign, and a character that increases the number of segments.",
    request_schema="Sms",
    example=SMS_EXAMPLE,
    parameters=({**_KEY, "example": "code-17"}, _TRACEPARENT),
)
CREATE_MANY: Final = Operation(
    name="create_emails",
    summary=f"Enqueue up to {MAX_BATCH_EMAILS:,} emails",
    description="Each email gets its own result, in the request's order. A refused email does not affect other emails.",
    response_schema="Results",
    request_schema="Batch",
    example={"emails": [{"message_key": "order-17-receipt", **EXAMPLE}]},
    parameters=(_TRACEPARENT,),
    problems=(*BODY_PROBLEMS, "invalid-body", "quota-exceeded"),
)


@dataclass(frozen=True, slots=True)
class EnqueueEndpoints:
    """Validates and enqueues emails."""

    access: AccessControl
    bodies: BodyReader
    validator: EmailValidator
    enqueuer: Enqueuer
    refusals: RefusalCounter

    async def create(self, request: Request) -> Response:
        """Enqueues one email. The email is committed before the response is sent."""
        return await self._create(request, {})

    async def create_sms(self, request: Request) -> Response:
        return await self._create(request, {"channel": SMS_CHANNEL})

    async def _create(self, request: Request, kind: Mapping[str, str]) -> Response:
        caller = await self.access.authenticate(request, Scope.SEND)
        key = idempotency_key(request)

        def made(body: bytearray, traceparent: str | None) -> Draft:
            document = parse(body)
            if kind and isinstance(document, dict):
                document = {**document, **kind}
            require_key(document, key)
            emails = [self.validator.email(document, caller, key=key)]
            return draft(emails, traceparent, caller.lane, is_test=caller.is_test)[0]

        with TRACER.enqueueing(request.headers.get("traceparent")) as enqueueing:
            async with self.bodies.read(request, caller.name) as body:
                item = await run_off_loop(len(body), lambda: made(body, enqueueing.traceparent))
                answer = (await self.enqueuer.enqueue([item], caller))[0]
            email = require_enqueued(answer)
            enqueueing.note(1, email.email_id)
        headers = {"Location": f"/v1/emails/{email.email_id}"}
        if email.acceptance is Acceptance.KNOWN:
            headers["Idempotent-Replayed"] = "true"
        return Response(orjson.dumps(_accepted(email, item)), 202, headers, "application/json")

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
                answers = iter(await self.enqueuer.enqueue(drafts, caller) if drafts else [])
                enqueueing.note(len(drafts))
        results = [
            self._result(next(answers), item, index) if isinstance(item, Draft) else self._refused(item)
            for index, item in enumerate(made)
        ]
        return Response(orjson.dumps({"results": results}), 200, media_type="application/json")

    def _drafts(self, documents: Sequence[object], caller: Caller, traceparent: str | None) -> list[Draft | Problem]:
        made: list[Message | Problem] = []
        mistakes = 0
        for index, document in enumerate(documents):
            finds_all = mistakes < MAX_BATCH_MISTAKES
            try:
                made.append(self.validator.email(document, caller, prefix=f"/emails/{index}", finds_all=finds_all))
            except Problem as problem:
                mistakes += len(problem.errors)
                made.append(problem.without_traceback())
        emails = [item for item in made if not isinstance(item, Problem)]
        drafts = iter(draft(emails, traceparent, caller.lane, is_test=caller.is_test))
        return [item if isinstance(item, Problem) else next(drafts) for item in made]

    def _result(self, answer: InsertResult, item: Draft, index: int) -> dict[str, Any]:
        try:
            email = require_enqueued(answer, f"/emails/{index}")
        except Problem as problem:
            return self._refused(problem)
        outcome = "accepted" if email.acceptance is Acceptance.ACCEPTED else "known"
        return {"outcome": outcome, "email": _accepted(email, item)}

    def _refused(self, problem: Problem) -> dict[str, Any]:
        self.refusals.count(problem.code)
        return {"outcome": "refused", "problem": problem.document()}


def _accepted(enqueued: Enqueued, item: Draft) -> dict[str, Any]:
    """The response. A repeated request gets the same response, even if the email's status has changed."""
    status = Status.PENDING if item.email.send_at is None else Status.WAITING
    document = {"id": enqueued.email_id, "message_key": enqueued.message_key, "status": status}
    if item.email.warnings:
        document["warnings"] = item.email.warnings
    if item.is_test:
        document["is_test"] = True
    return document
