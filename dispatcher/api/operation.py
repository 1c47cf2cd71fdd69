"""The OpenAPI 3.1 document of the HTTP API, and what describes an operation in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from dispatcher.admission.problems import MEDIA_TYPE, PROBLEM_TYPES
from dispatcher.api.status_endpoints import TENANT
from dispatcher.domain.status import Status
from dispatcher.version import VERSION

_COMMON_PROBLEMS: Final = (
    "database-unavailable",
    "malformed-request",
    "method-not-allowed",
    "request-timeout",
    "headers-too-large",
    "internal-error",
    "overloaded",
)
_KEY_PROBLEMS: Final = (
    "unauthorized",
    "insufficient-scope",
    "tenant-missing",
    "tenant-forbidden",
    "host-forbidden",
    "rate-limited",
)
BY_POST: Final = "_by_post"
"""The end of the name of an operation that is the same as a DELETE, for clients that send no body with DELETE."""
_SENTENCE_END: Final = re.compile(r"(?<=[.:]) (?=[A-Z])")
_ABOUT_COMMAND: Final = re.compile(r"--|\bcommand|Exit codes|^Examples?:")
_WORD: Final = re.compile(r"(?<!^)(?=[A-Z])")
BODY_PROBLEMS: Final = ("malformed-json", "body-too-large", "unsupported-media-type")


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of one operation, which is one method of one path, such as `POST /v1/emails`.

    Without `needs_body`, the body may be missing. `problems`: the codes that not every operation can return. `schemas`:
    those that this operation adds to the document, by name. Without `needs_key`, requests are signed instead.
    """

    name: str
    summary: str
    description: str
    response_schema: str | None
    problems: tuple[str, ...]
    status: int = 200
    request_schema: str | None = None
    needs_body: bool = True
    example: Any = None
    parameters: tuple[dict[str, Any], ...] = ()
    headers: dict[str, Any] = field(default_factory=dict)
    needs_key: bool = True
    schemas: dict[str, Any] = field(default_factory=dict)

    def document(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "tags": [_tag(path)],
            "summary": self.summary,
            "description": self.description,
            "operationId": self.name,
            "parameters": list(self.parameters),
            "responses": self._responses(),
        }
        if not self.needs_key:
            entry["security"] = []
        if self.request_schema:
            media_type: dict[str, Any] = {"schema": reference(self.request_schema), "example": self.example}
            entry["requestBody"] = {"required": self.needs_body, "content": {"application/json": media_type}}
        return entry

    def _responses(self) -> dict[str, dict[str, Any]]:
        success: dict[str, Any] = {"description": "Success."}
        if self.response_schema is not None:
            success["content"] = {"application/json": {"schema": reference(self.response_schema)}}
        if self.headers:
            success["headers"] = self.headers
        codes: dict[int, list[str]] = {}
        key_problems = _KEY_PROBLEMS if self.needs_key else ()
        for code in (*self.problems, *key_problems, *_COMMON_PROBLEMS):
            codes.setdefault(PROBLEM_TYPES[code].status, []).append(code)
        problems = {str(status): _problems(status, codes[status]) for status in sorted(codes)}
        return {str(self.status): success, **problems}


def operation_name(action: type[object]) -> str:
    """The name of an action's operation: `list_held` for ListHeld."""
    return _WORD.sub("_", action.__name__).lower()


def of_operation(text: str) -> str:
    """The description of an action without the sentences that are about its command."""
    return " ".join(each for each in _SENTENCE_END.split(text) if not _ABOUT_COMMAND.search(each))


def _tag(path: str) -> str:
    """The group of an operation in the documentation, by the first part of its path after the version."""
    name = path.split("/")[2]
    return "SMS" if name == "sms" else name.replace("-", " ").capitalize()


def reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def object_schema(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def path_parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": description}


def _problems(status: int, codes: list[str]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": " ".join(f"`{code}`: {PROBLEM_TYPES[code].title}" for code in codes),
        "content": {MEDIA_TYPE: {"schema": reference("Problem")}},
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


TENANT_PARAMETER: Final = TENANT.document("tenant_id")
ID: Final = {"type": "string", "format": "uuid"}
DECISION_PROBLEMS: Final = ("not-found", *BODY_PROBLEMS, "invalid-body")
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
    "Problem": {
        "type": "object",
        "required": ["type", "title", "status", "code"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "code": {"type": "string", "enum": list(PROBLEM_TYPES)},
            "detail": {"type": "string"},
            "email_status": {
                "type": "string",
                "enum": list(Status),
                "description": "With `too-late`: the email's status.",
            },
            "errors": {"type": "array", "items": _FIELD_ERROR},
        },
    },
}
_ABOUT: Final = (
    "Stores emails durably, one per message key, and reports their status. `dispatcher run` sends them. Every error "
    "response is a problem document (RFC 9457): `code` identifies the problem, `errors` locates each mistake in the "
    "request. Every response has `X-Request-Id`; for a key with limits also `RateLimit-Limit`, `-Remaining` and "
    "`-Reset` (requests), and `X-Quota-Limit`, `-Remaining` and `-Reset` (recipients per day)."
)


def openapi(
    operations: Iterable[tuple[str, str, Operation]], schemas: dict[str, Any], *, needs_key: bool
) -> dict[str, Any]:
    """The OpenAPI document of operations, each with its method and path. `schemas`: those that no operation adds."""
    paths: dict[str, dict[str, Any]] = {}
    components = _SCHEMAS | schemas
    for method, path, operation in operations:
        # A path of Starlette can name a converter, such as `{email_id:uuid}`; a path of OpenAPI cannot.
        paths.setdefault(re.sub(r":\w+}", "}", path), {})[method.lower()] = operation.document(path)
        components |= operation.schemas
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Email Dispatcher", "description": _ABOUT, "version": VERSION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        description = "An API key from `dispatcher keys create`, sent as `Authorization: Bearer …`."
        scheme = {"type": "http", "scheme": "bearer", "description": description}
        whole["components"]["securitySchemes"] = {"key": scheme}
        whole["security"] = [{"key": []}]
    return whole
