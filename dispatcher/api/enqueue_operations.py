"""What the OpenAPI document says about enqueueing emails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from dispatcher.api.email_schema import EXAMPLE, SMS_EXAMPLE
from dispatcher.api.operation import BODY_PROBLEMS, ID, Operation, object_schema, reference
from dispatcher.api.validation import KEY_HEADER, KEY_PATTERN, MAX_BATCH_EMAILS
from dispatcher.domain.text import MAX_KEY_CHARACTERS

_EMAIL_PROBLEMS: Final = (
    "invalid-email",
    "email-not-allowed",
    "no-capable-provider",
    "sender-forbidden",
    "lane-forbidden",
)
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
    parameters=(_KEY, _TRACEPARENT),
    problems=(
        *("idempotency-key-missing", "idempotency-key-invalid", "idempotency-key-in-use", "idempotency-key-reused"),
        *BODY_PROBLEMS,
        *_EMAIL_PROBLEMS,
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
SCHEMAS: Final[dict[str, Any]] = {
    "Batch": {
        "type": "object",
        "additionalProperties": False,
        "required": ["emails"],
        "properties": {
            "emails": {"type": "array", "minItems": 1, "maxItems": MAX_BATCH_EMAILS, "items": reference("KeyedEmail")}
        },
    },
    "Accepted": object_schema(
        {
            "id": ID,
            "message_key": {"type": "string"},
            "status": {"type": "string", "enum": ["pending", "waiting"]},
            "warnings": {"type": "array", "items": {"type": "string"}},
        },
        "warnings",
    ),
    "Result": {
        "oneOf": [
            object_schema({"outcome": {"enum": ["accepted", "known"]}, "email": reference("Accepted")}),
            object_schema({"outcome": {"const": "refused"}, "problem": reference("Problem")}),
        ]
    },
    "Results": object_schema({"results": {"type": "array", "items": reference("Result")}}),
}
