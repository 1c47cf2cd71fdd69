"""The endpoints that report the status of emails, never their content."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from uuid import UUID

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl, Caller
from dispatcher.api.problems import FieldError, Problem
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_id import lowest_id_at
from dispatcher.domain.email_rules import MAX_TENANT_CHARACTERS, tenant
from dispatcher.domain.instant import read_instant
from dispatcher.domain.lease_recovery import longest_recovery_seconds
from dispatcher.domain.outcome import Reason, left_out
from dispatcher.domain.status import Status
from dispatcher.domain.waiting import explain_wait
from dispatcher.errors import InvalidEmail
from dispatcher.store.emails import AttemptRow, EmailFilter, EmailRow, EmailStore

DEFAULT_PAGE_EMAILS: Final = 50
MAX_PAGE_EMAILS: Final = 200
MAX_FILTER_CHARACTERS: Final = 255
CONCURRENT_LISTS: Final = 2
"""The most concurrent list queries. More could slow down enqueueing."""
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""UUIDs of version 7 cannot represent earlier instants."""
_LOWEST: Final = UUID(int=0)
_HIGHEST: Final = UUID(int=2**128 - 1)

_UNPRINTABLE: Final = (
    r"\x00-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\uffff"
)
"""Control characters, every space except U+0020, and characters that reverse or hide other characters."""
PRINTABLE: Final = rf"^[^{_UNPRINTABLE}]*$"
NOT_BLANK: Final = rf"^ *[^ {_UNPRINTABLE}][^{_UNPRINTABLE}]*$"
"""Like `PRINTABLE`, with at least one character other than a space."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter: its parser, its JSON Schema, and its description in the OpenAPI document."""

    parse: Callable[[str], Any]
    schema: Mapping[str, Any]
    description: str


def _one_of(values: type[Status | Reason]) -> Callable[[str], Status | Reason]:
    def parse(text: str) -> Status | Reason:
        try:
            return values(text)
        except ValueError:
            raise ValueError(f"must be one of: {', '.join(values)}") from None

    return parse


def is_printable(text: str) -> bool:
    """Whether a text has only printable characters, as `PRINTABLE` defines them."""
    return re.fullmatch(PRINTABLE, text) is not None


def _text(text: str) -> str:
    if not 1 <= len(text) <= MAX_FILTER_CHARACTERS or not is_printable(text):
        raise ValueError(f"must be 1 to {MAX_FILTER_CHARACTERS} printable characters")
    return text


def _instant(text: str) -> UUID:
    return lowest_id_at(max(read_instant(text), _EPOCH))


def _cursor(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ValueError("must be the `next` of a previous page") from None


def limit_of(text: str) -> int:
    """The parser of a page's length."""
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not 1 <= int(text) <= MAX_PAGE_EMAILS:
        raise ValueError(f"must be a whole number from 1 to {MAX_PAGE_EMAILS}")
    return int(text)


def _tenant(text: str) -> str:
    try:
        return tenant(text)
    except InvalidEmail as error:
        raise ValueError(error.reason) from None


FILTER_TEXT: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_FILTER_CHARACTERS,
    "pattern": PRINTABLE,
    "description": "Printable characters.",
}
TENANT_ID: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_TENANT_CHARACTERS,
    "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]*$",
}
_INSTANT: Final = {"type": "string", "format": "date-time"}
PARAMETERS: Final[Mapping[str, Parameter]] = {
    "status": Parameter(_one_of(Status), {"type": "string", "enum": list(Status)}, "Only emails with this status."),
    "error_type": Parameter(
        _one_of(Reason),
        {"type": "string", "enum": list(Reason)},
        "Only emails with this error type.",
    ),
    "provider": Parameter(_text, FILTER_TEXT, "Only emails whose last attempt used this provider."),
    "correlation_id": Parameter(_text, FILTER_TEXT, "Only emails with this correlation id."),
    "created_from": Parameter(_instant, _INSTANT, "Only emails created at this time or later."),
    "created_before": Parameter(_instant, _INSTANT, "Only emails created before this time."),
    "cursor": Parameter(_cursor, {"type": "string", "format": "uuid"}, "The `next` of the previous page."),
    "limit": Parameter(
        limit_of,
        {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_EMAILS, "default": DEFAULT_PAGE_EMAILS},
        "The most emails per page.",
    ),
}
TENANT: Final = Parameter(
    _tenant,
    TENANT_ID,
    "The tenant. Leave it out if you use an API key: the key has a tenant. Default without keys: `default`.",
)


@dataclass(frozen=True, slots=True)
class StatusEndpoints:
    """Reads emails, their attempts, and what providers reported about them.

    Attributes:
        listing: Limits concurrent list queries.
        lease_seconds: DISPATCHER_LEASE_SECONDS, to estimate when an expired lease is recovered.
    """

    access: AccessControl
    store: EmailStore
    listing: asyncio.Semaphore
    lease_seconds: float

    async def get(self, request: Request) -> Response:
        """Returns one email, by its id."""
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {"tenant_id": TENANT})
            tenant_id = _tenant_of(caller, given)
            return await self._one(await self.store.find(tenant_id, request.path_params["email_id"]))

    async def get_by_key(self, request: Request) -> Response:
        """Returns one email, by its message key."""
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {"tenant_id": TENANT})
            key = request.path_params["message_key"]
            if "\0" in key or not key.isprintable():
                raise Problem("not-found")
            return await self._one(await self.store.find_by_key(_tenant_of(caller, given), key))

    async def list(self, request: Request) -> Response:
        """Returns a page of emails, newest first."""
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {**PARAMETERS, "tenant_id": TENANT})
            wanted = EmailFilter(*(given.get(name) for name in ("status", "error_type", "provider", "correlation_id")))
            below = min(given.get("cursor", _HIGHEST), given.get("created_before", _HIGHEST))
            from_id = given.get("created_from", _LOWEST)
            limit = given.get("limit", DEFAULT_PAGE_EMAILS)
            async with self.listing:
                emails, next_cursor = await self.store.list(
                    _tenant_of(caller, given), wanted, below_id=below, from_id=from_id, limit=limit
                )
        page = {"emails": [document(email) for email in emails], "next": next_cursor}
        return Response(orjson.dumps(page), media_type="application/json")

    async def _one(self, email: EmailRow | None) -> Response:
        if email is None:
            raise Problem("not-found", "The tenant has no email with this id or key.")
        attempts = await self.store.list_attempts(email.email_id)
        whole = document(email) | {
            "waiting": await self._waiting(email),
            "attempts": [_attempt(attempt) for attempt in attempts],
            "events": await self.store.list_events(email.email_id),
        }
        return Response(orjson.dumps(whole), media_type="application/json")

    async def _waiting(self, email: EmailRow) -> dict[str, Any] | None:
        """Why the email is not sent yet. Leaves out the explanation, which may mention other tenants' emails."""
        if email.status not in (Status.PENDING, Status.WAITING, Status.SENDING):
            return None
        facts = await self.store.find_wait(email.email_id)
        if facts is None:
            return None
        found = explain_wait(facts, recovery_seconds=longest_recovery_seconds(self.lease_seconds))
        return {"reason": found.reason, "until": found.until}


def document(email: EmailRow) -> dict[str, Any]:
    """The JSON object for an email."""
    fields = _without_success_text(asdict(email))
    refused = None if email.error_type else left_out(email.error)
    return {"id": fields.pop("email_id"), **fields, "refused_recipients": refused}


def _attempt(attempt: AttemptRow) -> dict[str, Any]:
    fields = _without_success_text(asdict(attempt))
    return {"attempt": fields.pop("attempt_number"), **fields}


def _without_success_text(fields: dict[str, Any]) -> dict[str, Any]:
    """Clears `error` if the attempt succeeded: the column then contains the provider's reply, such as `250 OK`."""
    return fields if fields["error_type"] else {**fields, "error": None}


def _tenant_of(caller: Caller, given: Mapping[str, Any]) -> str:
    return caller.tenant(given.get("tenant_id"))


def parameters(request: Request, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """Parses a request's query parameters.

    Raises:
        Problem: `invalid-parameter`, with every unknown, repeated or invalid parameter (up to 20).
    """
    given: dict[str, Any] = {}
    errors = []
    for name, text in request.query_params.multi_items():
        parameter = known.get(name)
        if parameter is None or name in given:
            reason = "is not a parameter of this operation" if parameter is None else "is given twice"
            errors.append(FieldError("parameter", "".join(c if c.isprintable() else "?" for c in name[:40]), reason))
            continue
        try:
            given[name] = parameter.parse(text)
        except ValueError as error:
            errors.append(FieldError("parameter", name, str(error)))
    if errors:
        raise Problem("invalid-parameter", errors=errors[:20])
    return given
