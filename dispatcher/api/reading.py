"""The endpoints that tell what became of emails; never their content."""

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

from dispatcher.api.access import Access, Caller
from dispatcher.api.problems import Flaw, Problem
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_id import lowest_id_at
from dispatcher.domain.email_rules import MAX_TENANT_CHARACTERS, tenant
from dispatcher.domain.outcome import Reason, left_out
from dispatcher.domain.rescue import longest_rescue_seconds
from dispatcher.domain.status import Status
from dispatcher.domain.waiting import why
from dispatcher.errors import InvalidEmail
from dispatcher.store.emails import AttemptRow, EmailFilter, EmailRow, EmailStore

DEFAULT_PAGE: Final = 50
MOST_IN_PAGE: Final = 200
MOST_TEXT_CHARACTERS: Final = 255
LISTS_AT_ONCE: Final = 2
"""Lists that are looked for at once: they must not keep the database from what is enqueued."""
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""No email is older. Earlier instants have no UUID of version 7."""
_LOWEST: Final = UUID(int=0)
_HIGHEST: Final = UUID(int=2**128 - 1)

_UNPRINTABLE: Final = (
    r"\x00-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\uffff"
)
"""Control characters, every space but U+0020, and characters that reverse or hide others."""
PRINTABLE: Final = rf"^[^{_UNPRINTABLE}]*$"
NOT_BLANK: Final = rf"^ *[^ {_UNPRINTABLE}][^{_UNPRINTABLE}]*$"
"""As `PRINTABLE`, with at least one character that is no space."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the list, and what its description says."""

    parse: Callable[[str], Any]
    schema: Mapping[str, Any]
    about: str


def _one_of(words: type[Status | Reason]) -> Callable[[str], Status | Reason]:
    def parse(text: str) -> Status | Reason:
        try:
            return words(text)
        except ValueError:
            raise ValueError(f"must be one of: {', '.join(words)}") from None

    return parse


def prints(text: str) -> bool:
    """Whether every character of a text is printable."""
    return re.fullmatch(PRINTABLE, text) is not None


def _text(text: str) -> str:
    if not 1 <= len(text) <= MOST_TEXT_CHARACTERS or not prints(text):
        raise ValueError(f"must be 1 to {MOST_TEXT_CHARACTERS} characters that print")
    return text


def _instant(text: str) -> UUID:
    try:
        instant = datetime.fromisoformat(text.upper())
    except ValueError:
        raise ValueError("must be an instant, like 2026-11-21T10:00:00Z") from None
    return lowest_id_at(max(instant if instant.tzinfo else instant.replace(tzinfo=UTC), _EPOCH))


def _cursor(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ValueError("must be a page's `next`") from None


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not 1 <= int(text) <= MOST_IN_PAGE:
        raise ValueError(f"must be a whole number from 1 to {MOST_IN_PAGE}")
    return int(text)


def _tenant(text: str) -> str:
    try:
        return tenant(text)
    except InvalidEmail as error:
        raise ValueError(error.reason) from None


SHORT: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": MOST_TEXT_CHARACTERS,
    "pattern": PRINTABLE,
    "description": "Characters that print.",
}
TENANT_ID: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_TENANT_CHARACTERS,
    "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]*$",
}
_INSTANT: Final = {"type": "string", "format": "date-time"}
PARAMETERS: Final[Mapping[str, Parameter]] = {
    "status": Parameter(_one_of(Status), {"type": "string", "enum": list(Status)}, "Emails of this status."),
    "error_type": Parameter(
        _one_of(Reason), {"type": "string", "enum": list(Reason)}, "Emails whose last attempt ended so."
    ),
    "provider": Parameter(_text, SHORT, "Emails that this provider was tried with last."),
    "correlation_id": Parameter(_text, SHORT, "Emails of this correlation id."),
    "created_from": Parameter(_instant, _INSTANT, "Emails from this instant on."),
    "created_before": Parameter(_instant, _INSTANT, "Emails before this instant."),
    "cursor": Parameter(_cursor, {"type": "string", "format": "uuid"}, "Where the page before ended: its `next`."),
    "limit": Parameter(
        _limit,
        {"type": "integer", "minimum": 1, "maximum": MOST_IN_PAGE, "default": DEFAULT_PAGE},
        "Emails per page, at most.",
    ),
}
TENANT: Final = Parameter(
    _tenant,
    TENANT_ID,
    "Whose emails. A key knows its tenant; without keys, it is `default`.",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """Tells what became of emails."""

    access: Access
    store: EmailStore
    listing: asyncio.Semaphore
    lease_seconds: float

    async def get(self, request: Request) -> Response:
        """One email by its id."""
        async with self.access.admitted(request, Scope.READ) as caller:
            given = parameters(request, {"tenant_id": TENANT})
            tenant_id = _tenant_of(caller, given)
            return await self._one(await self.store.find(tenant_id, request.path_params["email_id"]))

    async def get_by_key(self, request: Request) -> Response:
        """One email by its message key."""
        async with self.access.admitted(request, Scope.READ) as caller:
            given = parameters(request, {"tenant_id": TENANT})
            key = request.path_params["message_key"]
            if "\0" in key or not key.isprintable():
                raise Problem("not-found")
            return await self._one(await self.store.find_by_key(_tenant_of(caller, given), key))

    async def list(self, request: Request) -> Response:
        """A page of emails, newest first."""
        async with self.access.admitted(request, Scope.READ) as caller:
            given = parameters(request, {**PARAMETERS, "tenant_id": TENANT})
            wanted = EmailFilter(*(given.get(name) for name in ("status", "error_type", "provider", "correlation_id")))
            below = min(given.get("cursor", _HIGHEST), given.get("created_before", _HIGHEST))
            from_id = given.get("created_from", _LOWEST)
            limit = given.get("limit", DEFAULT_PAGE)
            async with self.listing:
                emails, following = await self.store.list(
                    _tenant_of(caller, given), wanted, below_id=below, from_id=from_id, limit=limit
                )
        page = {"emails": [document(email) for email in emails], "next": following}
        return Response(orjson.dumps(page), media_type="application/json")

    async def _one(self, email: EmailRow | None) -> Response:
        if email is None:
            raise Problem("not-found", "No email of this tenant has this name.")
        attempts = await self.store.list_attempts(email.email_id)
        whole = document(email) | {
            "waiting": await self._waiting(email),
            "attempts": [_attempt(attempt) for attempt in attempts],
        }
        return Response(orjson.dumps(whole), media_type="application/json")

    async def _waiting(self, email: EmailRow) -> dict[str, Any] | None:
        """Why the email is not sent yet. Leaves out the sentence, which may mention other tenants' emails."""
        if email.status not in (Status.PENDING, Status.SENDING):
            return None
        facts = await self.store.find_wait(email.email_id)
        if facts is None:
            return None
        found = why(facts, rescue_seconds=longest_rescue_seconds(self.lease_seconds))
        return {"reason": found.reason, "until": found.until}


def document(email: EmailRow) -> dict[str, Any]:
    """An email as it is told."""
    told = _without_praise(asdict(email))
    refused = None if email.error_type else left_out(email.error)
    return {"id": told.pop("email_id"), **told, "refused_recipients": refused}


def _attempt(attempt: AttemptRow) -> dict[str, Any]:
    told = _without_praise(asdict(attempt))
    return {"attempt": told.pop("attempt_number"), **told}


def _without_praise(told: dict[str, Any]) -> dict[str, Any]:
    """What a provider said as it accepted, such as `250 OK`, is on record, too, and no error."""
    return told if told["error_type"] else {**told, "error": None}


def _tenant_of(caller: Caller, given: Mapping[str, Any]) -> str:
    return caller.tenant(given.get("tenant_id"))


def parameters(request: Request, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """What a request gives for parameters.

    Raises:
        Problem: with everything that is wrong: a name that is unknown, given twice, or a value that cannot be.
    """
    given: dict[str, Any] = {}
    flaws = []
    for name, text in request.query_params.multi_items():
        parameter = known.get(name)
        if parameter is None or name in given:
            reason = "is no parameter here" if parameter is None else "is given twice"
            flaws.append(Flaw("parameter", "".join(c if c.isprintable() else "?" for c in name[:40]), reason))
            continue
        try:
            given[name] = parameter.parse(text)
        except ValueError as error:
            flaws.append(Flaw("parameter", name, str(error)))
    if flaws:
        raise Problem("invalid-parameter", flaws=flaws[:20])
    return given
