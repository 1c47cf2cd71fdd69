"""The OpenAPI 3.1 document: every operation with its parameters, body and responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dispatcher.api.email_schema import EXAMPLE, SCHEMAS
from dispatcher.api.feed_endpoints import PARAMETERS as EVENT_PARAMETERS
from dispatcher.api.operator_endpoints import MAX_IDS, MAX_PER_SECOND, MAX_REASON_CHARACTERS, MAX_SECONDS
from dispatcher.api.problems import MEDIA_TYPE, PROBLEM_TYPES
from dispatcher.api.status_endpoints import FILTER_TEXT, NOT_BLANK, PARAMETERS, TENANT, TENANT_ID, Parameter
from dispatcher.api.suppression_endpoints import MAX_NOTE_CHARACTERS, MAX_RECIPIENTS, MAX_STOPPED
from dispatcher.api.suppression_endpoints import PARAMETERS as SUPPRESSION_PARAMETERS
from dispatcher.api.validation import KEY_HEADER, KEY_PATTERN, MAX_BATCH_EMAILS
from dispatcher.domain.message_key import MAX_KEY_CHARACTERS
from dispatcher.domain.outcome import Outcome, Reason
from dispatcher.domain.outgoing_event import TYPES
from dispatcher.domain.provider_event import Bounce, EventKind
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import SuppressionReason
from dispatcher.domain.waiting import WaitReason
from dispatcher.domain.webhook import WebhookState
from dispatcher.ops.replaying import MIN_PER_SECOND
from dispatcher.ops.webhooks import MAX_URL_CHARACTERS
from dispatcher.store.replays import ReplayState

ABOUT: Final = (
    "Stores emails durably, each key once, and reports their status. `dispatcher run` sends them. Every error response "
    "is a problem document (RFC 9457): `code` identifies the problem, `errors` locates each mistake in the request."
)
_COMMON_PROBLEMS: Final = (
    "malformed-request",
    "method-not-allowed",
    "request-timeout",
    "headers-too-large",
    "internal-error",
    "overloaded",
)
_KEY_PROBLEMS: Final = ("unauthorized", "insufficient-scope", "tenant-forbidden", "host-forbidden", "rate-limited")
_BODY_PROBLEMS: Final = ("malformed-json", "body-too-large", "unsupported-media-type")
_STORE_PROBLEMS: Final = ("database-unavailable",)
_EMAIL_PROBLEMS: Final = ("invalid-email", "email-not-allowed", "no-capable-provider", "sender-forbidden")


@dataclass(frozen=True, slots=True)
class Operation:
    """One path and method.

    Attributes:
        response_schema: The name of the success response's schema; None if the response has no body.
        problems: The problem codes of this operation, except the codes that every operation may return.
        request_schema: The name of the request body's schema; None if the request has no body.
        needs_key: Whether a request needs an API key. A provider's requests are signed instead.
    """

    name: str
    summary: str
    description: str
    response_schema: str | None
    problems: tuple[str, ...]
    status: int = 200
    request_schema: str | None = None
    example: Any = None
    parameters: tuple[dict[str, Any], ...] = ()
    headers: dict[str, Any] = field(default_factory=dict)
    needs_key: bool = True

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """All responses by status."""
        success: dict[str, Any] = {"description": "Success."}
        if self.response_schema is not None:
            success["content"] = {"application/json": {"schema": _schema(self.response_schema)}}
        if self.headers:
            success["headers"] = self.headers
        codes: dict[int, list[str]] = {}
        key_problems = _KEY_PROBLEMS if self.needs_key else ()
        for code in (*self.problems, *key_problems, *_STORE_PROBLEMS, *_COMMON_PROBLEMS):
            codes.setdefault(PROBLEM_TYPES[code].status, []).append(code)
        problems: dict[int | str, dict[str, Any]] = {
            status: _problems(status, codes[status]) for status in sorted(codes)
        }
        return {self.status: success, **problems}

    def extra(self) -> dict[str, Any]:
        """Parameters and request body. FastAPI cannot derive them, because the endpoints parse requests themselves."""
        extra: dict[str, Any] = {"parameters": list(self.parameters)}
        if not self.needs_key:
            extra["security"] = []
        if self.request_schema:
            media_type: dict[str, Any] = {"schema": _schema(self.request_schema)}
            if self.example is not None:
                media_type["example"] = self.example
            extra["requestBody"] = {"required": True, "content": {"application/json": media_type}}
        return extra


def _schema(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _problems(status: int, codes: list[str]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": " ".join(f"`{code}`: {PROBLEM_TYPES[code].title}" for code in codes),
        "content": {MEDIA_TYPE: {"schema": _schema("Problem")}},
    }
    if status in (409, 429, 503):
        description = "Seconds to wait before the request is retried."
        response["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": description}}
    if status == 405:
        description = "The methods that the path supports."
        response["headers"] = {"Allow": {"schema": {"type": "string"}, "description": description, "required": True}}
    if status == 401:
        response["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return response


def _query(name: str, parameter: Parameter) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": dict(parameter.schema), "description": parameter.description}


def _path(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": description}


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
_TENANT: Final = _query("tenant_id", TENANT)

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
        *_BODY_PROBLEMS,
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
CREATE_MANY: Final = Operation(
    name="create_emails",
    summary=f"Enqueue up to {MAX_BATCH_EMAILS:,} emails",
    description="Each email gets its own result, in the request's order. A refused email does not affect other emails.",
    response_schema="Results",
    request_schema="Batch",
    example={"emails": [{"message_key": "order-17-receipt", **EXAMPLE}]},
    parameters=(_TRACEPARENT,),
    problems=(*_BODY_PROBLEMS, "invalid-body", "quota-exceeded"),
)
LIST: Final = Operation(
    name="list_emails",
    summary="List emails",
    description="Newest first. A page may be short or even empty; the list ends when `next` is null.",
    response_schema="Page",
    parameters=(*(_query(name, parameter) for name, parameter in PARAMETERS.items()), _TENANT),
    problems=("invalid-parameter",),
)
GET: Final = Operation(
    name="get_email",
    summary="Get an email's status",
    description="Status, attempts, what providers reported, and why a pending email waits; never the content.",
    response_schema="EmailStatus",
    parameters=(_path("email_id", {"type": "string", "format": "uuid"}, "The email's id."), _TENANT),
    problems=("not-found", "invalid-parameter"),
)
GET_BY_KEY: Final = Operation(
    name="get_email_by_key",
    summary="Get an email's status by its key",
    description="Percent-encode the key as UTF-8. A slash in it may stay unencoded.",
    response_schema="EmailStatus",
    parameters=(
        _path("message_key", {"type": "string", "minLength": 1, "maxLength": 255}, "The email's message key."),
        _TENANT,
    ),
    problems=("not-found", "invalid-parameter"),
)


_DECISION_PROBLEMS: Final = ("not-found", *_BODY_PROBLEMS, "invalid-body")
_HELD_ID: Final = _path("email_id", {"type": "string", "format": "uuid"}, "The email's id.")
_REPLAY_ID: Final = _path("replay_id", {"type": "integer", "minimum": 1}, "The replay's id.")
CONFIRM: Final = Operation(
    name="confirm_held",
    summary="Confirm that a held email arrived",
    description="Sets the email's status to `sent`. The audit log records the reason.",
    response_schema="Verdict",
    request_schema="Decision",
    example={"reason": "The provider's dashboard shows it as delivered."},
    parameters=(_HELD_ID,),
    problems=("not-held", *_DECISION_PROBLEMS),
)
RELEASE: Final = Operation(
    name="release_held",
    summary="Send a held email again",
    description="Sets the email's status to `pending`, due now. The recipient may get the email twice. The audit log "
    "records the reason.",
    response_schema="Verdict",
    request_schema="Decision",
    example={"reason": "The provider's dashboard does not list it."},
    parameters=(_HELD_ID,),
    problems=("not-held", *_DECISION_PROBLEMS),
)
CREATE_REPLAY: Final = Operation(
    name="create_replay",
    summary="Send failed emails again",
    description="Selects the emails now, then replays them at `per_second`. Skips emails that are `sent` by then. "
    "Replays held emails only with `include_held`.",
    status=202,
    response_schema="Replay",
    request_schema="NewReplay",
    example={"error_type": "refused", "reason": "The domain is verified now."},
    problems=(*_BODY_PROBLEMS, "invalid-body"),
    headers={
        "Location": {
            "schema": {"type": "string"},
            "description": "The path of the replay's progress.",
            "required": True,
        }
    },
)
GET_REPLAY: Final = Operation(
    name="get_replay",
    summary="Get a replay's progress",
    description="`is_active` is true while a process runs the replay. If `state` is `running` and `is_active` "
    "is false, the replay was interrupted: resume it.",
    response_schema="Replay",
    parameters=(_REPLAY_ID, _TENANT),
    problems=("not-found", "invalid-parameter"),
)
STOP_REPLAY: Final = Operation(
    name="stop_replay",
    summary="Stop a replay",
    description="Stops after the current email. Emails that were already replayed are still sent. Idempotent.",
    response_schema="Replay",
    parameters=(_REPLAY_ID, _TENANT),
    problems=("not-found", "invalid-parameter"),
)
RESUME_REPLAY: Final = Operation(
    name="resume_replay",
    summary="Resume a replay",
    description="Continues a stopped or interrupted replay with its next email. No effect if it is running or done.",
    status=202,
    response_schema="Replay",
    request_schema="Decision",
    example={"reason": "The process was restarted."},
    parameters=(_REPLAY_ID,),
    problems=_DECISION_PROBLEMS,
)
LIST_SUPPRESSIONS: Final = Operation(
    name="list_suppressions",
    summary="List suppressed recipients",
    description="Newest first, masked: the addresses are not stored. Entries that have expired are listed, too.",
    response_schema="Suppressions",
    parameters=(*(_query(name, parameter) for name, parameter in SUPPRESSION_PARAMETERS.items()), _TENANT),
    problems=("invalid-parameter",),
)
ADD_SUPPRESSIONS: Final = Operation(
    name="add_suppressions",
    summary="Suppress recipients",
    description="From now on, the addresses and domains get no email of the tenant. A domain does not include its "
    "subdomains. If a recipient already has an entry that lasts at least as long, that entry does not change. The "
    "audit log records the reason.",
    response_schema="AddedSuppressions",
    request_schema="NewSuppressions",
    example={"recipients": ["ann@example.org", "example.net"], "reason": "closed account"},
    problems=(*_BODY_PROBLEMS, "invalid-body"),
)
REMOVE_SUPPRESSIONS: Final = Operation(
    name="remove_suppressions",
    summary="Remove suppressed recipients",
    description="The next email goes to the recipients again. `stopped_email_ids` are failed emails that the entries "
    "had stopped, oldest first: `POST /v1/replays` with these ids sends each of them once.",
    response_schema="RemovedSuppressions",
    request_schema="OldSuppressions",
    example={"recipients": ["ann@example.org"], "reason": "mailbox works again"},
    problems=(*_BODY_PROBLEMS, "invalid-body"),
)
_WEBHOOK_ID: Final = _path("webhook_id", {"type": "integer", "minimum": 1}, "The webhook's id.")
LIST_EVENTS: Final = Operation(
    name="list_events",
    summary="Poll what became of emails",
    description="The tenant's events after a cursor, oldest first: sent, failed, held, delivered, bounced, complained "
    "about, suppressed. No event is left out, whenever its transaction commits. Poll again with `next`. The first "
    "request starts the recording of events. They are kept for DISPATCHER_RETAIN_EVENTS_DAYS.",
    response_schema="Events",
    parameters=(*(_query(name, parameter) for name, parameter in EVENT_PARAMETERS.items()), _TENANT),
    problems=("invalid-parameter",),
)
CREATE_WEBHOOK: Final = Operation(
    name="create_webhook",
    summary="Add a webhook",
    description="The tenant's events are posted to the URL from now on, signed according to Standard Webhooks. Only "
    "this response contains the secret.",
    status=201,
    response_schema="NewWebhook",
    request_schema="WebhookRequest",
    example={"url": "https://shop.example.com/hooks", "events": ["email.bounced"], "reason": "the shop's mail page"},
    problems=("too-many-webhooks", *_BODY_PROBLEMS, "invalid-body"),
    headers={"Location": {"schema": {"type": "string"}, "description": "The path of the webhook.", "required": True}},
)
LIST_WEBHOOKS: Final = Operation(
    name="list_webhooks",
    summary="List webhooks",
    description="The tenant's webhooks, with their state.",
    response_schema="Webhooks",
    parameters=(_TENANT,),
    problems=("invalid-parameter",),
)
GET_WEBHOOK: Final = Operation(
    name="get_webhook",
    summary="Get a webhook",
    description="Its state, and how many events wait for it.",
    response_schema="Webhook",
    parameters=(_WEBHOOK_ID, _TENANT),
    problems=("not-found", "invalid-parameter"),
)
REMOVE_WEBHOOK: Final = Operation(
    name="remove_webhook",
    summary="Remove a webhook",
    description="Events that were not yet delivered to it are dropped. Returns the webhook as it was.",
    response_schema="Webhook",
    parameters=(_WEBHOOK_ID, _TENANT),
    problems=("not-found", "invalid-parameter"),
)
TEST_WEBHOOK: Final = Operation(
    name="test_webhook",
    summary="Post a test event",
    description="Posts an event of the type `webhook.test`, even if the webhook is disabled, and returns the answer.",
    response_schema="WebhookTest",
    parameters=(_WEBHOOK_ID, _TENANT),
    problems=("not-found", "invalid-parameter"),
)
ROTATE_WEBHOOK: Final = Operation(
    name="rotate_webhook",
    summary="Give a webhook a new secret",
    description="For 24 hours, events are signed with both secrets. Only this response contains the new secret.",
    response_schema="NewWebhook",
    request_schema="Decision",
    example={"reason": "a developer left"},
    parameters=(_WEBHOOK_ID,),
    problems=_DECISION_PROBLEMS,
)
ENABLE_WEBHOOK: Final = Operation(
    name="enable_webhook",
    summary="Enable a webhook",
    description="Makes a disabled or failing webhook active, and immediately posts the events that wait for it.",
    response_schema="Webhook",
    request_schema="Decision",
    example={"reason": "the receiver works again"},
    parameters=(_WEBHOOK_ID,),
    problems=_DECISION_PROBLEMS,
)
REPLAY_WEBHOOK: Final = Operation(
    name="replay_webhook",
    summary="Deliver events again",
    description="Delivers all events since a given time once more, with the same ids.",
    response_schema="Webhook",
    request_schema="WebhookReplay",
    example={"since": "2026-11-21T10:00:00Z", "reason": "the receiver lost them"},
    parameters=(_WEBHOOK_ID,),
    problems=_DECISION_PROBLEMS,
)


def _signature_header(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": True, "schema": {"type": "string"}, "description": description}


_EVENT_PROBLEMS: Final = ("signature-invalid", "signature-stale", *_BODY_PROBLEMS)
RECEIVE_SENDGRID: Final = Operation(
    name="receive_sendgrid_events",
    summary="Receive SendGrid's events",
    description="For SendGrid's signed event webhook. The API responds after the events are committed, and never shows "
    "whether an email exists.",
    status=204,
    response_schema=None,
    request_schema="SendGridEvents",
    example=[{"event": "delivered", "email_id": "01938a7e-8f3c-7d42-9c51-2f6d1f0e9a77", "timestamp": 1764000000}],
    parameters=(
        _signature_header("X-Twilio-Email-Event-Webhook-Signature", "ECDSA over the timestamp and the raw body."),
        _signature_header("X-Twilio-Email-Event-Webhook-Timestamp", "When the request was signed, in Unix seconds."),
    ),
    problems=_EVENT_PROBLEMS,
    needs_key=False,
)
RECEIVE_SES: Final = Operation(
    name="receive_ses_events",
    summary="Receive Amazon SES's events from Amazon SNS",
    description="For HTTPS subscriptions of the topics in DISPATCHER_SES_EVENTS_TOPICS. The API confirms them itself. "
    "The body may have any media type.",
    status=204,
    response_schema=None,
    request_schema="SnsMessage",
    example={"Type": "Notification", "TopicArn": "arn:aws:sns:eu-west-1:123456789012:ses-events", "Message": "{…}"},
    problems=("topic-forbidden", *_EVENT_PROBLEMS, "provider-unavailable"),
    needs_key=False,
)


def _nullable(kind: str, form: str | None = None) -> dict[str, Any]:
    return {"type": [kind, "null"], **({"format": form} if form else {})}


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


_INSTANT: Final = {"type": "string", "format": "date-time"}
_ID: Final = {"type": "string", "format": "uuid"}
_OUTCOMES: Final = [kind.__name__.lower() for kind in get_args(Outcome)]
_STATUS: Final = {"type": "string", "enum": [status.value for status in Status]}
_EMAIL_FIELDS: Final[dict[str, Any]] = {
    "id": _ID,
    "message_key": {"type": "string"},
    "status": _STATUS,
    "attempt_count": {"type": "integer", "minimum": 0},
    "correlation_id": _nullable("string"),
    "error_type": _nullable("string"),
    "error": _nullable("string"),
    "provider": _nullable("string"),
    "provider_message_id": _nullable("string"),
    "created_at": _INSTANT,
    "sent_at": _nullable("string", "date-time"),
    "refused_recipients": _nullable("string"),
}
_EVENT_TYPES: Final = {"type": "string", "enum": list(TYPES)}
_WEBHOOK_FIELDS: Final[dict[str, Any]] = {
    "id": {"type": "integer"},
    "url": {"type": "string"},
    "tenant_id": _nullable("string"),
    "events": {"type": "array", "items": _EVENT_TYPES},
    "recipients": {"type": "boolean"},
    "state": {"type": "string", "enum": list(WebhookState)},
    "failing_since": _nullable("string", "date-time"),
    "next_attempt_at": _INSTANT,
    "last_error": _nullable("string"),
    "delivered_at": _nullable("string", "date-time"),
    "created_at": _INSTANT,
    "lag_seconds": _nullable("number"),
    "retries": {"type": "integer", "description": "Refused events that wait for another attempt."},
    "given_up": {"type": "integer", "description": "Events that were refused at every attempt."},
}
_REASON: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_REASON_CHARACTERS,
    "pattern": NOT_BLANK,
    "description": "Printable characters, not only spaces. The audit log records the reason.",
}
_SUPPRESSION_KIND: Final = {"type": "string", "enum": list(SuppressionReason)}
_SUPPRESSED: Final = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_RECIPIENTS,
    "items": {"type": "string"},
    "description": "Addresses, and domains such as `example.org`.",
}
_FIELD_ERROR: Final = {
    "type": "object",
    "required": ["detail"],
    "properties": {
        "pointer": {"type": "string", "description": "JSON pointer into the body, as a URI fragment."},
        "header": {"type": "string"},
        "parameter": {"type": "string"},
        "detail": {"type": "string"},
    },
}
_SCHEMAS: Final[dict[str, Any]] = {
    **SCHEMAS,
    "Batch": {
        "type": "object",
        "additionalProperties": False,
        "required": ["emails"],
        "properties": {
            "emails": {"type": "array", "minItems": 1, "maxItems": MAX_BATCH_EMAILS, "items": _schema("KeyedEmail")}
        },
    },
    "Accepted": _object(
        {"id": _ID, "message_key": {"type": "string"}, "status": {"type": "string", "const": "pending"}}
    ),
    "Result": {
        "oneOf": [
            _object({"outcome": {"enum": ["accepted", "known"]}, "email": _schema("Accepted")}),
            _object({"outcome": {"const": "refused"}, "problem": _schema("Problem")}),
        ]
    },
    "Results": _object({"results": {"type": "array", "items": _schema("Result")}}),
    "Attempt": _object(
        {
            "attempt": {"type": "integer", "minimum": 1},
            "provider": {"type": "string"},
            "started_at": _INSTANT,
            "finished_at": _INSTANT,
            "outcome": {"type": "string", "enum": _OUTCOMES},
            "error_type": _nullable("string"),
            "error": _nullable("string"),
            "provider_code": _nullable("string"),
        }
    ),
    "ProviderEvent": _object(
        {
            "happened_at": {**_INSTANT, "description": "By the provider's clock."},
            "kind": {"type": "string", "enum": [kind.value for kind in EventKind]},
            "bounce": {
                "enum": [*(bounce.value for bounce in Bounce), None],
                "description": "How permanent a bounce is.",
            },
            "provider": {"type": "string"},
            "code": _nullable("string"),
            "detail": _nullable("string"),
            "received_at": _INSTANT,
            "recipient": {
                "type": ["integer", "null"],
                "minimum": 1,
                "description": "The recipient's position, counted over to, cc, bcc; null if unknown, or if the content "
                "was deleted.",
            },
        }
    ),
    "ListedEmail": _object(_EMAIL_FIELDS),
    "EmailStatus": _object(
        {
            **_EMAIL_FIELDS,
            "waiting": {"oneOf": [_schema("Waiting"), {"type": "null"}]},
            "attempts": {"type": "array", "items": _schema("Attempt")},
            "events": {
                "type": "array",
                "items": _schema("ProviderEvent"),
                "description": "What providers reported after they accepted the email, by their clocks.",
            },
        }
    ),
    "Waiting": _object(
        {
            "reason": {
                "type": "string",
                "enum": list(WaitReason),
                "description": "Why the email is not sent yet.",
            },
            "until": _nullable("string", "date-time"),
        }
    ),
    "Page": _object(
        {"emails": {"type": "array", "items": _schema("ListedEmail")}, "next": _nullable("string", "uuid")}
    ),
    "Decision": _object({"reason": _REASON, "tenant_id": TENANT_ID}, "tenant_id"),
    "Verdict": _object({"id": _ID, "verdict": {"type": "string", "enum": ["confirmed", "released"]}}),
    "NewReplay": {
        "type": "object",
        "additionalProperties": False,
        "required": ["reason"],
        "properties": {
            "reason": _REASON,
            "tenant_id": TENANT_ID,
            "error_type": {"type": "string", "enum": list(Reason)},
            "provider": FILTER_TEXT,
            "status": {"type": "string", "enum": ["failed", "held"]},
            "email_ids": {"type": "array", "minItems": 1, "maxItems": MAX_IDS, "items": _ID},
            "older_than_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
            "newer_than_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
            "include_held": {"type": "boolean"},
            "per_second": {"type": "number", "minimum": MIN_PER_SECOND, "maximum": MAX_PER_SECOND},
            "force": {
                "type": "boolean",
                "default": False,
                "description": "Keep this replay's own `per_second` even if a running replay shares emails with it.",
            },
        },
    },
    "Replay": _object(
        {
            "id": {"type": "integer"},
            "state": {"type": "string", "enum": [state.value for state in ReplayState]},
            "is_active": {"type": "boolean"},
            "total": {"type": "integer"},
            "waiting": {"type": "integer"},
            "outcomes": {"type": "object", "additionalProperties": {"type": "integer"}},
            "include_held": {"type": "boolean"},
            "per_second": _nullable("number"),
            "paced_with": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "Running replays with some of the same emails. All these replays together keep to the "
                "lowest `per_second` among them.",
            },
            "reason": {"type": "string"},
            "created_at": _INSTANT,
            "changed_at": _INSTANT,
        }
    ),
    "FeedEvent": _object(
        {
            "id": {**_ID, "description": "The same in each response and each webhook."},
            "cursor": {"type": "string", "description": "`after=` this cursor returns the events after this event."},
            "type": _EVENT_TYPES,
            "timestamp": _INSTANT,
            "data": _object(
                {
                    "email_id": _ID,
                    "tenant_id": {"type": "string"},
                    "message_key": {"type": "string"},
                    "correlation_id": _nullable("string"),
                    "provider": _nullable("string"),
                    "reason": _nullable("string"),
                    "code": _nullable("string"),
                    "bounce": {"enum": [*Bounce, None]},
                    "happened_at": _INSTANT,
                }
            ),
        }
    ),
    "Events": _object(
        {
            "events": {"type": "array", "items": _schema("FeedEvent")},
            "next": {"type": "string", "description": "The cursor for the next request, even if there is no event."},
            "has_more": {"type": "boolean", "description": "Whether the next request may return events now."},
        }
    ),
    "Webhook": _object(_WEBHOOK_FIELDS),
    "NewWebhook": _object({**_WEBHOOK_FIELDS, "secret": {"type": "string", "pattern": "^whsec_"}}),
    "Webhooks": _object({"webhooks": {"type": "array", "items": _schema("Webhook")}}),
    "WebhookRequest": _object(
        {
            "url": {
                "type": "string",
                "maxLength": MAX_URL_CHARACTERS,
                "description": "An https URL without a user.",
            },
            "reason": _REASON,
            "tenant_id": TENANT_ID,
            "events": {"type": "array", "minItems": 1, "maxItems": len(TYPES), "items": _EVENT_TYPES},
            "recipients": {"type": "boolean", "default": False, "description": "Include recipients' addresses."},
        },
        *("tenant_id", "events", "recipients"),
    ),
    "WebhookReplay": _object({"since": _INSTANT, "reason": _REASON, "tenant_id": TENANT_ID}, "tenant_id"),
    "WebhookTest": _object({"is_accepted": {"type": "boolean"}, "detail": {"type": "string"}}),
    "SendGridEvents": {"type": "array", "items": {"type": "object"}},
    "SnsMessage": {
        "type": "object",
        "required": ["Type", "TopicArn", "Message"],
        "properties": {
            "Type": {"enum": ["Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"]},
            "SignatureVersion": {"enum": ["1", "2"]},
        },
    },
    "Suppression": _object(
        {
            "id": {"type": "integer"},
            "tenant_id": {"type": "string"},
            "recipient": {"type": "string", "description": "Masked, such as `j•••@example.com`; or a domain."},
            "is_domain": {"type": "boolean"},
            "kind": _SUPPRESSION_KIND,
            "source_email_id": {**_nullable("string", "uuid"), "description": "The email whose event made the entry."},
            "note": _nullable("string"),
            "created_at": _INSTANT,
            "expires_at": _nullable("string", "date-time"),
        }
    ),
    "Suppressions": _object(
        {"suppressions": {"type": "array", "items": _schema("Suppression")}, "next": _nullable("integer")}
    ),
    "NewSuppressions": _object(
        {
            "recipients": _SUPPRESSED,
            "reason": _REASON,
            "kind": {**_SUPPRESSION_KIND, "default": "manual"},
            "note": {"type": "string", "maxLength": MAX_NOTE_CHARACTERS, "description": "For operators."},
            "expires_at": {**_INSTANT, "description": "When the entry ends. Default: never."},
            "tenant_id": TENANT_ID,
        },
        *("kind", "note", "expires_at", "tenant_id"),
    ),
    "AddedSuppressions": _object({"added": {"type": "integer", "description": "Entries that are new or changed."}}),
    "OldSuppressions": _object({"recipients": _SUPPRESSED, "reason": _REASON, "tenant_id": TENANT_ID}, "tenant_id"),
    "RemovedSuppressions": _object(
        {
            "removed": {"type": "integer"},
            "stopped_count": {"type": "integer"},
            "stopped_email_ids": {"type": "array", "items": _ID, "maxItems": MAX_STOPPED},
        }
    ),
    "Problem": {
        "type": "object",
        "required": ["type", "title", "status", "code"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "code": {"type": "string", "enum": list(PROBLEM_TYPES)},
            "detail": {"type": "string"},
            "errors": {"type": "array", "items": _FIELD_ERROR},
        },
    },
}


def document(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document of the application.

    Args:
        needs_key: Whether requests need an API key.
    """
    whole: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, openapi_version="3.1.0"
    )
    components = whole.setdefault("components", {})
    components["schemas"] = _SCHEMAS
    if needs_key:
        description = "An API key from `dispatcher keys create`, sent as `Authorization: Bearer …`."
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": description}}
        whole["security"] = [{"key": []}]
    return whole
