"""What the OpenAPI document says about cancelling and rescheduling emails."""

from __future__ import annotations

from typing import Any, Final

from dispatcher.api.operation import (
    BODY_PROBLEMS,
    DECISION_PROBLEMS,
    ID,
    REASON,
    Operation,
    object_schema,
    path_parameter,
)
from dispatcher.api.operator_endpoints import MAX_IDS, MAX_SECONDS
from dispatcher.api.status_endpoints import FILTER_TEXT, TENANT_ID
from dispatcher.api.unsent_endpoints import MAX_EMAILS
from dispatcher.domain.status import Status
from dispatcher.ops.unsent import Change

_EMAIL_ID: Final = path_parameter("email_id", {"type": "string", "format": "uuid"}, "The email's id.")
_WHO: Final = "Needs a key with the scope `send` or `operate`. The audit log records the reason."
_SELECTED: Final = (
    f"Changes at most {MAX_EMAILS:,} emails; repeat the request while `has_more` is true. With `dry_run`, changes "
    "nothing."
)
CANCEL: Final = Operation(
    name="cancel_email",
    summary="Cancel an email",
    description="Cancels an email that is pending or waiting: it is never sent. Otherwise, returns `too-late`. "
    f"Idempotent. {_WHO}",
    response_schema="ChangedEmail",
    request_schema="Decision",
    example={"reason": "The customer has paid."},
    parameters=(_EMAIL_ID,),
    problems=("too-late", *DECISION_PROBLEMS),
)
RESCHEDULE: Final = Operation(
    name="reschedule_email",
    summary="Change when an email is sent",
    description="A pending or waiting email waits until `send_at`. If `send_at` has passed, the email is due "
    f"immediately. If the email has any other status, returns `too-late`. {_WHO}",
    response_schema="ChangedEmail",
    request_schema="NewTime",
    example={"send_at": "2026-12-24T18:00:00+01:00", "reason": "The customer asked for it."},
    parameters=(_EMAIL_ID,),
    problems=("too-late", *DECISION_PROBLEMS),
)
CANCEL_SELECTED: Final = Operation(
    name="cancel_emails",
    summary="Cancel emails by a filter",
    description=f"Cancels pending and waiting emails of the tenant. {_SELECTED}",
    response_schema="ChangedEmails",
    request_schema="EmailSelection",
    example={"lane": "bulk", "correlation_id": "newsletter-48", "reason": "Its price is wrong."},
    problems=(*BODY_PROBLEMS, "invalid-body"),
)
RESCHEDULE_SELECTED: Final = Operation(
    name="reschedule_emails",
    summary="Change when emails are sent, by a filter",
    description=f"Reschedules pending and waiting emails of the tenant. {_SELECTED}",
    response_schema="ChangedEmails",
    request_schema="NewTimes",
    example={"lane": "bulk", "send_at": "2026-12-24T18:00:00+01:00", "reason": "A traffic peak."},
    problems=(*BODY_PROBLEMS, "invalid-body"),
)
_SEND_AT: Final = {
    "type": "string",
    "format": "date-time",
    "description": "With a zone, at most 366 days ahead. If the time has passed, the email is due immediately.",
}
_SELECTION: Final[dict[str, Any]] = {
    "reason": REASON,
    "tenant_id": TENANT_ID,
    "status": {"type": "string", "enum": ["pending", "waiting"]},
    "lane": FILTER_TEXT,
    "channel": FILTER_TEXT,
    "correlation_id": FILTER_TEXT,
    "email_ids": {"type": "array", "minItems": 1, "maxItems": MAX_IDS, "items": ID},
    "older_than_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
    "newer_than_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
    "all": {"const": True, "description": "Required for a change without a filter: every unsent email of the tenant."},
    "dry_run": {"type": "boolean", "default": False},
}
_OPTIONAL: Final = tuple(name for name in _SELECTION if name != "reason")
SCHEMAS: Final[dict[str, Any]] = {
    "ChangedEmail": object_schema({"id": ID, "status": {"type": "string", "enum": ["cancelled", "waiting"]}}),
    "NewTime": object_schema({"send_at": _SEND_AT, "reason": REASON, "tenant_id": TENANT_ID}, "tenant_id"),
    "EmailSelection": object_schema(_SELECTION, *_OPTIONAL),
    "NewTimes": object_schema({"send_at": _SEND_AT, **_SELECTION}, *_OPTIONAL),
    "ChangedEmails": object_schema(
        {
            "selected": {
                "type": "object",
                "description": "The number of selected emails by their status.",
                "propertyNames": {"enum": [Status.PENDING.value, Status.WAITING.value]},
                "additionalProperties": {"type": "integer"},
            },
            "samples": {
                "type": "object",
                "description": "The ids of a few selected emails by their status.",
                "additionalProperties": {"type": "array", "items": ID},
            },
            "has_more": {"type": "boolean", "description": "Whether the filter selects more emails."},
            "results": {
                "type": "object",
                "description": "The number of emails by result; empty with `dry_run`.",
                "propertyNames": {"enum": list(Change)},
                "additionalProperties": {"type": "integer"},
            },
        }
    ),
}
