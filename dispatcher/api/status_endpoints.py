"""The endpoints that report the status of emails, never their content."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl
from dispatcher.api.problems import FieldError, Problem
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_rules import MAX_TENANT_CHARACTERS, tenant
from dispatcher.domain.lease_recovery import longest_recovery_seconds
from dispatcher.domain.outcome import delivered_recipients, left_out
from dispatcher.domain.status import Status
from dispatcher.domain.waiting import explain_wait
from dispatcher.errors import InvalidEmail
from dispatcher.ops.email_timeline import timeline
from dispatcher.store.emails import (
    EmailRow,
    find_facts,
    find_tenant_email,
    list_acts,
    list_attempts,
    list_events,
    list_replays_of,
)
from dispatcher.store.statements import Record, Source

MAX_PAGE_EMAILS: Final = 200
MAX_FILTER_CHARACTERS: Final = 255

_UNPRINTABLE: Final = (
    r"\x00-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\uffff"
)
"""Control characters, every space except U+0020, and characters that reverse or hide other characters."""
PRINTABLE: Final = rf"^[^{_UNPRINTABLE}]*$"
NOT_BLANK: Final = rf"^ *[^ {_UNPRINTABLE}][^{_UNPRINTABLE}]*$"
"""The pattern of a text that has only printable characters, and at least one character other than a space."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter: its parser, its JSON Schema, and its description in the OpenAPI document."""

    parse: Callable[[str], Any]
    schema: Mapping[str, Any]
    description: str


def is_printable(text: str) -> bool:
    """Whether a text has only printable characters, as `PRINTABLE` defines them."""
    return re.fullmatch(PRINTABLE, text) is not None


def limit_of(text: str) -> int:
    """Parses the number of rows per page.

    Raises:
        ValueError: the number is invalid. The message follows the parameter's name: `must be a whole number from 1 to
            200`.
    """
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
TENANT: Final = Parameter(
    _tenant,
    TENANT_ID,
    "The tenant. Leave it out if you use an API key: the key has a tenant. Default without keys: `default`.",
)


_PRIVATE_ACTS: Final = frozenset({"reveal", "forget"})
"""Acts of operators on private data. A tenant does not see these acts, nor the names and reasons of operators."""
_SHOWN: Final = (
    *("email_id", "message_key", "channel", "status", "attempt_count", "correlation_id", "error_type", "error"),
    *("provider", "provider_message_id", "created_at", "sent_at"),
)


@dataclass(frozen=True, slots=True)
class StatusEndpoints:
    """Reads emails, their attempts, and what providers reported about them.

    Attributes:
        lease_seconds: DISPATCHER_LEASE_SECONDS, to estimate when an expired lease is recovered.
    """

    access: AccessControl
    lease_seconds: float
    source: Source

    async def get(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {"tenant_id": TENANT})
            tenant_id = caller.tenant(given.get("tenant_id"))
            return await self._one(tenant_id, email_id=request.path_params["email_id"])

    async def get_by_key(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {"tenant_id": TENANT})
            key = request.path_params["message_key"]
            if "\0" in key or not key.isprintable():
                raise Problem("not-found")
            return await self._one(caller.tenant(given.get("tenant_id")), message_key=key)

    async def _one(self, tenant_id: str, **identity: Any) -> Response:
        email = await find_tenant_email(self.source, tenant_id, **identity)
        if email is None:
            raise Problem("not-found", "The tenant has no email with this id or key.")
        attempts = await list_attempts(self.source, email.email_id)
        events = await list_events(self.source, email.email_id)
        moments = timeline(
            asdict(email) | {"last_error": email.error},
            attempts=attempts,
            events=events,
            acts=[act for act in await list_acts(self.source, email.email_id) if act["action"] not in _PRIVATE_ACTS],
            replays=await list_replays_of(self.source, email.email_id),
        )
        whole = document(email) | {
            "delivered_recipients": delivered_recipients(email.status, email.recipient_outcomes),
            "waiting": await self._waiting(email),
            "attempts": [_attempt(attempt) for attempt in attempts],
            "events": events,
            "timeline": [{"at": each.at, "what": each.what, "detail": each.detail} for each in moments],
        }
        return Response(orjson.dumps(whole), media_type="application/json")

    async def _waiting(self, email: EmailRow) -> dict[str, Any] | None:
        """Why the email is not sent yet, and until when it waits; None if it is not waiting.

        Leaves out the longer explanation, which may mention other tenants' emails.
        """
        if email.status not in (Status.PENDING, Status.WAITING, Status.SENDING):
            return None
        facts = await find_facts(self.source, email.email_id, most_ahead=0)
        if facts is None:
            return None
        found = explain_wait(facts, recovery_seconds=longest_recovery_seconds(self.lease_seconds))
        return {"reason": found.reason, "until": found.until}


def document(email: EmailRow) -> dict[str, Any]:
    """The JSON object for an email."""
    shown = _without_success_text({name: getattr(email, name) for name in _SHOWN})
    refused = None if email.error_type else left_out(email.error)
    return {"id": shown.pop("email_id"), **shown, "refused_recipients": refused}


def _attempt(attempt: Record) -> dict[str, Any]:
    fields = _without_success_text(attempt)
    return {"attempt": fields["attempt_number"]} | {
        name: value for name, value in fields.items() if name not in ("attempt_number", "worker")
    }


def _without_success_text(fields: dict[str, Any]) -> dict[str, Any]:
    """Clears `error` if the attempt succeeded: the column then contains the provider's reply, such as `250 OK`."""
    return fields if fields["error_type"] else {**fields, "error": None}


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
