"""The endpoints that report the status of emails, never their bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.admission.access import Caller
from dispatcher.admission.problems import FieldError, Problem
from dispatcher.api.access import AccessControl
from dispatcher.domain import kinds
from dispatcher.domain.api_key import Scope
from dispatcher.domain.text import shown, unknown_fault
from dispatcher.ops.email_history import find_history, status_of
from dispatcher.store.statements import Source


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter: its parser, its JSON Schema, and its description in the OpenAPI document."""

    parse: Callable[[str], Any]
    schema: Mapping[str, Any]
    description: str

    def document(self, name: str) -> dict[str, Any]:
        return {"name": name, "in": "query", "schema": dict(self.schema), "description": self.description}


MAX_ERRORS: Final = 20
TENANT_ID: Final = kinds.TENANT.schema
TENANT: Final = Parameter(
    kinds.TENANT.of_json,
    TENANT_ID,
    "The tenant. Leave it out if you use an API key: the key has a tenant. Default without keys: `default`.",
)


@dataclass(frozen=True, slots=True)
class StatusEndpoints:
    """Reads emails, their attempts, and what providers reported about them."""

    access: AccessControl
    lease_seconds: float
    source: Source

    async def get(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {"tenant_id": TENANT})
            return await self._one(caller, given, request.path_params["email_id"])

    async def get_by_key(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {"tenant_id": TENANT})
            key = request.path_params["message_key"]
            if "\0" in key or not key.isprintable():
                raise Problem("not-found")
            return await self._one(caller, given, None, key)

    async def _one(
        self, caller: Caller, given: Mapping[str, Any], email_id: UUID | None, message_key: str | None = None
    ) -> Response:
        history = await find_history(
            self.source,
            email_id,
            tenant_id=caller.tenant(given.get("tenant_id")),
            message_key=message_key,
            lease_seconds=self.lease_seconds,
            most_ahead=0,
            sees_content=caller.sees_content,
        )
        if history is None:
            raise Problem("not-found", "The tenant has no email with this id or key.")
        return Response(orjson.dumps(status_of(history)), media_type="application/json")


def parameters(request: Request, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """A request's query parameters. Raises a Problem with each unknown, repeated or invalid parameter (up to 20)."""
    given: dict[str, Any] = {}
    errors = []
    for name, text in request.query_params.multi_items():
        parameter = known.get(name)
        if parameter is None or name in given:
            reason = unknown_fault(name, known) if parameter is None else "is given twice"
            errors.append(FieldError("parameter", shown(name), reason))
            if len(errors) == MAX_ERRORS:
                break
            continue
        try:
            given[name] = parameter.parse(text)
        except ValueError as error:
            errors.append(FieldError("parameter", name, str(error)))
    if errors:
        raise Problem("invalid-parameter", errors=errors[:MAX_ERRORS])
    return given
