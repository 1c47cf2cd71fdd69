"""What the OpenAPI document says about the status of emails."""

from __future__ import annotations

from typing import Any, Final, get_args

from dispatcher.api.operation import (
    ID,
    INSTANT,
    TENANT_PARAMETER,
    Operation,
    nullable,
    object_schema,
    path_parameter,
    reference,
)
from dispatcher.domain.outcome import Outcome
from dispatcher.domain.provider_event import Bounce, EventKind
from dispatcher.domain.status import Status
from dispatcher.domain.waiting import WaitReason

GET: Final = Operation(
    name="get_email",
    summary="Get an email's status",
    description="Status, timeline, attempts, providers' events, and why an unsent email waits; never the content.",
    response_schema="EmailStatus",
    parameters=(path_parameter("email_id", {"type": "string", "format": "uuid"}, "The email's id."), TENANT_PARAMETER),
    problems=("not-found", "invalid-parameter"),
)
GET_BY_KEY: Final = Operation(
    name="get_email_by_key",
    summary="Get an email's status by its key",
    description="Percent-encode the key as UTF-8. A slash in the key may stay unencoded.",
    response_schema="EmailStatus",
    parameters=(
        path_parameter("message_key", {"type": "string", "minLength": 1, "maxLength": 255}, "The email's message key."),
        TENANT_PARAMETER,
    ),
    problems=("not-found", "invalid-parameter"),
)
_OUTCOMES: Final = [kind.__name__.lower() for kind in get_args(Outcome)]
_STATUS: Final = {"type": "string", "enum": [status.value for status in Status]}
_EMAIL_FIELDS: Final[dict[str, Any]] = {
    "id": ID,
    "message_key": {"type": "string"},
    "channel": {"type": "string", "description": "`email` or `sms`."},
    "status": _STATUS,
    "attempt_count": {"type": "integer", "minimum": 0},
    "correlation_id": nullable("string"),
    "error_type": nullable("string"),
    "error": nullable("string"),
    "provider": nullable("string"),
    "provider_message_id": nullable("string"),
    "created_at": INSTANT,
    "sent_at": nullable("string", "date-time"),
    "refused_recipients": nullable("string"),
}
SCHEMAS: Final[dict[str, Any]] = {
    "Attempt": object_schema(
        {
            "attempt": {"type": "integer", "minimum": 1},
            "provider": {"type": "string"},
            "started_at": {**INSTANT, "description": "By the clock of the sending host."},
            "finished_at": {**INSTANT, "description": "By the clock of the sending host."},
            "outcome": {"type": "string", "enum": _OUTCOMES},
            "error_type": nullable("string"),
            "error": nullable("string"),
            "provider_code": nullable("string"),
        }
    ),
    "ProviderEvent": object_schema(
        {
            "happened_at": {**INSTANT, "description": "By the provider's clock."},
            "kind": {"type": "string", "enum": [kind.value for kind in EventKind]},
            "bounce": {
                "enum": [*(bounce.value for bounce in Bounce), None],
                "description": "How permanent a bounce is.",
            },
            "provider": {"type": "string"},
            "code": nullable("string"),
            "detail": nullable("string"),
            "doubt": {
                "enum": ["impossible", "recipient", None],
                "description": "Why the event is not believed (docs/events.md).",
            },
            "received_at": INSTANT,
            "recipient": {
                "type": ["integer", "null"],
                "minimum": 1,
                "description": "The recipient's position in the list of to, cc and bcc; null if unknown, or if the "
                "content was deleted.",
            },
        }
    ),
    "EmailStatus": object_schema(
        {
            **_EMAIL_FIELDS,
            "delivered_recipients": {
                **nullable("string"),
                "description": "The recipients who have an email that was delivered in part, by position: `1-2, 5`.",
            },
            "waiting": {"oneOf": [reference("Waiting"), {"type": "null"}]},
            "attempts": {"type": "array", "items": reference("Attempt")},
            "events": {
                "type": "array",
                "items": reference("ProviderEvent"),
                "description": "What providers reported after they accepted the email, by their clocks.",
            },
            "timeline": {
                "type": "array",
                "items": reference("Moment"),
                "description": "What is known to have happened to the email, oldest first.",
            },
        }
    ),
    "Moment": object_schema({"at": INSTANT, "what": {"type": "string"}, "detail": nullable("string")}),
    "Waiting": object_schema(
        {
            "reason": {
                "type": "string",
                "enum": list(WaitReason),
                "description": "Why the email is not sent yet.",
            },
            "until": nullable("string", "date-time"),
        }
    ),
}
