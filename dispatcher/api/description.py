"""The API's description (OpenAPI 3.1): what each operation takes, and every answer that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dispatcher.api.email_schema import EXAMPLE, SCHEMAS
from dispatcher.api.intake import KEY_HEADER, KEY_PATTERN, MOST_IN_BATCH
from dispatcher.api.operating import MOST_IDS, MOST_PER_SECOND, MOST_REASON_CHARACTERS, MOST_SECONDS
from dispatcher.api.problems import KINDS, MEDIA_TYPE
from dispatcher.api.reading import NOT_BLANK, PARAMETERS, SHORT, TENANT, TENANT_ID, Parameter
from dispatcher.domain.message_key import MAX_KEY_CHARACTERS
from dispatcher.domain.outcome import Outcome, Reason
from dispatcher.domain.status import Status
from dispatcher.domain.waiting import Wait
from dispatcher.ops.replaying import LEAST_PER_SECOND
from dispatcher.store.replays import ReplayState

ABOUT: Final = (
    "Accepts emails, durably and once, and tells what became of them. `dispatcher run` sends them. Every answer that "
    "is no success is a problem (RFC 9457) with a `code`; its `errors` name what in the request is wrong."
)
_EVERYWHERE: Final = (
    "malformed-request",
    "method-not-allowed",
    "request-timeout",
    "headers-too-large",
    "internal-error",
    "overloaded",
)
_WITH_KEY: Final = ("unauthorized", "insufficient-scope", "tenant-forbidden", "host-forbidden", "rate-limited")
_WITH_BODY: Final = ("malformed-json", "body-too-large", "unsupported-media-type")
_STORE: Final = ("database-unavailable",)
_EMAIL: Final = ("invalid-email", "email-not-allowed", "no-capable-provider", "sender-forbidden")


@dataclass(frozen=True, slots=True)
class Operation:
    """One path and method.

    Attributes:
        answer: The name of the schema of a success.
        problems: Every code that it may answer with.
        body: The name of the schema of what it takes.
    """

    name: str
    summary: str
    about: str
    answer: str
    problems: tuple[str, ...]
    status: int = 200
    body: str | None = None
    example: Any = None
    parameters: tuple[dict[str, Any], ...] = ()
    headers: dict[str, Any] = field(default_factory=dict)

    def responses(self) -> dict[int | str, dict[str, Any]]:
        """Every answer, by status."""
        success: dict[str, Any] = {
            "description": self.summary,
            "content": {"application/json": {"schema": _schema(self.answer)}},
        }
        if self.headers:
            success["headers"] = self.headers
        codes: dict[int, list[str]] = {}
        for code in (*self.problems, *_WITH_KEY, *_STORE, *_EVERYWHERE):
            codes.setdefault(KINDS[code].status, []).append(code)
        problems: dict[int | str, dict[str, Any]] = {
            status: _problems(status, codes[status]) for status in sorted(codes)
        }
        return {self.status: success, **problems}

    def extra(self) -> dict[str, Any]:
        """What FastAPI cannot know: parameters and body are read by hand."""
        extra: dict[str, Any] = {"parameters": list(self.parameters)}
        if self.body:
            media_type: dict[str, Any] = {"schema": _schema(self.body)}
            if self.example is not None:
                media_type["example"] = self.example
            extra["requestBody"] = {"required": True, "content": {"application/json": media_type}}
        return extra


def _schema(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _problems(status: int, codes: list[str]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "description": " ".join(f"`{code}`: {KINDS[code].title}" for code in codes),
        "content": {MEDIA_TYPE: {"schema": _schema("Problem")}},
    }
    if status in (409, 429, 503):
        about = "Seconds after which the same request may succeed."
        described["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": about}}
    if status == 405:
        about = "The methods that the path has."
        described["headers"] = {"Allow": {"schema": {"type": "string"}, "description": about, "required": True}}
    if status == 401:
        described["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return described


def _query(name: str, parameter: Parameter) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": dict(parameter.schema), "description": parameter.about}


def _path(name: str, schema: dict[str, Any], about: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": about}


_TRACEPARENT: Final = {
    "name": "traceparent",
    "in": "header",
    "schema": {"type": "string"},
    "description": "W3C trace context, carried to the message and the logs.",
}
_KEY: Final = {
    "name": KEY_HEADER,
    "in": "header",
    "schema": {"type": "string", "pattern": KEY_PATTERN},
    "description": "Your own name for the email, in double quotes or bare: the same key never makes a second email. "
    f"1 to {MAX_KEY_CHARACTERS} printable ASCII characters. Required, unless the body has `message_key`, which may "
    "contain any printable characters.",
    "example": "order-17-receipt",
}
_TENANT: Final = _query("tenant_id", TENANT)

CREATE: Final = Operation(
    name="create_email",
    summary="Accept one email",
    about="Durable when the answer says so. The same request again gets the same answer, marked as replayed.",
    status=202,
    answer="Accepted",
    body="Email",
    example=EXAMPLE,
    parameters=(_KEY, _TRACEPARENT),
    problems=(
        *("idempotency-key-missing", "idempotency-key-invalid", "idempotency-key-in-use", "idempotency-key-reused"),
        *_WITH_BODY,
        *_EMAIL,
        "quota-exceeded",
    ),
    headers={
        "Location": {"schema": {"type": "string"}, "description": "Where to ask what became of it.", "required": True},
        "Idempotent-Replayed": {
            "schema": {"type": "string", "enum": ["true"]},
            "description": "The email was accepted by an earlier request.",
        },
    },
)
CREATE_MANY: Final = Operation(
    name="create_emails",
    summary=f"Accept up to {MOST_IN_BATCH} emails",
    about="Each email has its own answer, in the order given: what is refused keeps no other from being accepted.",
    answer="Results",
    body="Batch",
    example={"emails": [{"message_key": "order-17-receipt", **EXAMPLE}]},
    parameters=(_TRACEPARENT,),
    problems=(*_WITH_BODY, "invalid-body", "quota-exceeded"),
)
LIST: Final = Operation(
    name="list_emails",
    summary="List emails",
    about="Newest first. A page may have fewer emails than there are, even none, while `next` says that there is more.",
    answer="Page",
    parameters=(*(_query(name, parameter) for name, parameter in PARAMETERS.items()), _TENANT),
    problems=("invalid-parameter",),
)
GET: Final = Operation(
    name="get_email",
    summary="What became of an email",
    about="Its status and every attempt; never its content.",
    answer="EmailStatus",
    parameters=(_path("email_id", {"type": "string", "format": "uuid"}, "The email's id."), _TENANT),
    problems=("not-found", "invalid-parameter"),
)
GET_BY_KEY: Final = Operation(
    name="get_email_by_key",
    summary="What became of the email with a key",
    about="A slash in the key may stand as it is.",
    answer="EmailStatus",
    parameters=(
        _path("message_key", {"type": "string", "minLength": 1, "maxLength": 255}, "The email's own key."),
        _TENANT,
    ),
    problems=("not-found", "invalid-parameter"),
)


_WITH_REASON: Final = ("not-found", *_WITH_BODY, "invalid-body")
_HELD_ID: Final = _path("email_id", {"type": "string", "format": "uuid"}, "The email's id.")
_REPLAY_ID: Final = _path("replay_id", {"type": "integer", "minimum": 1}, "The replay's id.")
CONFIRM: Final = Operation(
    name="confirm_held",
    summary="A held email did arrive",
    about="Somebody knows it: the email is `sent` from now on. On record, with the reason.",
    answer="Verdict",
    body="Decision",
    example={"reason": "The provider's page shows it as delivered."},
    parameters=(_HELD_ID,),
    problems=("not-held", *_WITH_REASON),
)
RELEASE: Final = Operation(
    name="release_held",
    summary="A held email shall be sent again",
    about="It is `pending` and due from now on, and may arrive twice. On record, with the reason.",
    answer="Verdict",
    body="Decision",
    example={"reason": "The provider's page does not know it."},
    parameters=(_HELD_ID,),
    problems=("not-held", *_WITH_REASON),
)
CREATE_REPLAY: Final = Operation(
    name="create_replay",
    summary="Have failed emails sent again",
    about="Settles which, and begins, at its pace. Those that are `sent` are skipped; held ones need `include_held`.",
    status=202,
    answer="Replay",
    body="NewReplay",
    example={"error_type": "refused", "reason": "The domain is verified now."},
    problems=(*_WITH_BODY, "invalid-body"),
    headers={"Location": {"schema": {"type": "string"}, "description": "Where to ask how it goes.", "required": True}},
)
GET_REPLAY: Final = Operation(
    name="get_replay",
    summary="How a replay goes",
    about="`is_active` says whether somebody is at it; a running one that nobody attends was interrupted.",
    answer="Replay",
    parameters=(_REPLAY_ID, _TENANT),
    problems=("not-found", "invalid-parameter"),
)
STOP_REPLAY: Final = Operation(
    name="stop_replay",
    summary="Stop a replay",
    about="It goes no further than the email under way; what was replayed stays so. A second call is harmless.",
    answer="Replay",
    parameters=(_REPLAY_ID, _TENANT),
    problems=("not-found", "invalid-parameter"),
)
RESUME_REPLAY: Final = Operation(
    name="resume_replay",
    summary="Have a replay go on",
    about="One that was stopped, or whose process ended, goes on exactly there. Harmless if it runs or is done.",
    status=202,
    answer="Replay",
    body="Decision",
    example={"reason": "The process was restarted."},
    parameters=(_REPLAY_ID,),
    problems=_WITH_REASON,
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
_TOLD: Final[dict[str, Any]] = {
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
_REASON: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": MOST_REASON_CHARACTERS,
    "pattern": NOT_BLANK,
    "description": "Characters that print, not spaces alone.",
}
_FLAW: Final = {
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
            "emails": {"type": "array", "minItems": 1, "maxItems": MOST_IN_BATCH, "items": _schema("KeyedEmail")}
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
    "ListedEmail": _object(_TOLD),
    "EmailStatus": _object(
        {
            **_TOLD,
            "waiting": {"oneOf": [_schema("Waiting"), {"type": "null"}]},
            "attempts": {"type": "array", "items": _schema("Attempt")},
        }
    ),
    "Waiting": _object(
        {
            "reason": {
                "type": "string",
                "enum": list(Wait),
                "description": "What has to happen before the email is sent.",
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
            "provider": SHORT,
            "status": {"type": "string", "enum": ["failed", "held"]},
            "email_ids": {"type": "array", "minItems": 1, "maxItems": MOST_IDS, "items": _ID},
            "older_than_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS},
            "newer_than_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS},
            "include_held": {"type": "boolean"},
            "per_second": {"type": "number", "minimum": LEAST_PER_SECOND, "maximum": MOST_PER_SECOND},
            "force": {
                "type": "boolean",
                "default": False,
                "description": "Keep this pace, even if other replays have some of the same emails.",
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
                "description": "Running replays with some of the same emails: all share the slowest of their paces.",
            },
            "reason": {"type": "string"},
            "created_at": _INSTANT,
            "changed_at": _INSTANT,
        }
    ),
    "Problem": {
        "type": "object",
        "required": ["type", "title", "status", "code"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "code": {"type": "string", "enum": list(KINDS)},
            "detail": {"type": "string"},
            "errors": {"type": "array", "items": _FLAW},
        },
    },
}


def document(app: FastAPI, *, needs_key: bool) -> dict[str, Any]:
    """The whole description.

    Args:
        needs_key: Whether requests need an API key now.
    """
    described: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, openapi_version="3.1.0"
    )
    components = described.setdefault("components", {})
    components["schemas"] = _SCHEMAS
    if needs_key:
        about = "An API key of `dispatcher keys create`, as `Authorization: Bearer …`."
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": about}}
        described["security"] = [{"key": []}]
    return described
