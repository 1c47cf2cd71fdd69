"""The endpoints that report the status of emails, never their content."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar
from uuid import UUID

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl
from dispatcher.api.fair_limiter import FairTurns
from dispatcher.api.problems import FieldError, Problem
from dispatcher.domain.api_key import Scope
from dispatcher.domain.email_rules import MAX_TENANT_CHARACTERS, tenant
from dispatcher.domain.instant import read_instant
from dispatcher.domain.lease_recovery import longest_recovery_seconds
from dispatcher.domain.outcome import Reason, delivered_recipients, left_out
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import Recipient
from dispatcher.domain.waiting import explain_wait
from dispatcher.errors import InvalidEmail
from dispatcher.ops.email_timeline import timeline
from dispatcher.ops.lookup import EmailQuery, find
from dispatcher.store.emails import (
    EmailRow,
    find_facts,
    find_tenant_email,
    list_acts,
    list_attempts,
    list_events,
    list_replays_of,
)
from dispatcher.store.lookup import FoundEmail
from dispatcher.store.statements import Record, Source

DEFAULT_PAGE_EMAILS: Final = 50
MAX_PAGE_EMAILS: Final = 200
MAX_FILTER_CHARACTERS: Final = 255
MAX_ADDRESS_CHARACTERS: Final = 1_000
CONCURRENT_LISTS: Final = 2
"""The most concurrent list queries; one tenant has at most one. More could slow down enqueueing."""

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


def _address(text: str) -> str:
    if _parsed(text).is_domain:
        raise ValueError("must be an address; for a domain, use `domain`")
    return text


def _domain(text: str) -> str:
    if not _parsed(text if "@" in text else f"@{text}").is_domain:
        raise ValueError("must be a domain; for an address, use `recipient`")
    return text


def _sender(text: str) -> str:
    _parsed(text)
    return text


def _parsed(text: str) -> Recipient:
    """Parses an address or a domain. Raises ValueError if the text is invalid; the message does not repeat the text."""
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise ValueError(f"must have at most {MAX_ADDRESS_CHARACTERS} characters")
    try:
        return Recipient.parse(text)
    except InvalidEmail as error:
        raise ValueError(error.reason) from None


def _cursor(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ValueError("must be the `next` of a previous page") from None


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
_INSTANT: Final = {"type": "string", "format": "date-time"}
_ADDRESS: Final = {"type": "string", "minLength": 3, "maxLength": MAX_ADDRESS_CHARACTERS}
PARAMETERS: Final[Mapping[str, Parameter]] = {
    "recipient": Parameter(
        _address, _ADDRESS, "Only emails to this address, in to, cc or bcc. Case does not matter. Percent-encode a `+`."
    ),
    "domain": Parameter(_domain, _ADDRESS, "Only emails with a recipient in this domain."),
    "from": Parameter(
        _sender, _ADDRESS, "Only emails from this address or domain (`@example.com`) whose content is not deleted yet."
    ),
    "tag": Parameter(_text, FILTER_TEXT, "Only emails with this tag whose content is not deleted yet."),
    "status": Parameter(_one_of(Status), {"type": "string", "enum": list(Status)}, "Only emails with this status."),
    "error_type": Parameter(
        _one_of(Reason),
        {"type": "string", "enum": list(Reason)},
        "Only emails with this error type.",
    ),
    "channel": Parameter(_text, FILTER_TEXT, "Only this channel: `email` or `sms`."),
    "provider": Parameter(_text, FILTER_TEXT, "Only emails whose last attempt used this provider."),
    "correlation_id": Parameter(_text, FILTER_TEXT, "Only emails with this correlation id."),
    "created_from": Parameter(read_instant, _INSTANT, "Only emails created at this time or later."),
    "created_before": Parameter(read_instant, _INSTANT, "Only emails created before this time."),
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


_SAME_NAMES: Final = ("recipient", "domain", "tag", "status", "channel", "error_type", "provider", "correlation_id")
"""The parameters whose names are also the names of fields of `EmailQuery`."""
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
        listing: Limits concurrent list queries.
        lease_seconds: DISPATCHER_LEASE_SECONDS, to estimate when an expired lease is recovered.
        source: Sessions for list queries.
    """

    access: AccessControl
    listing: FairTurns
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

    async def list(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.READ) as caller:
            given = parameters(request, {**PARAMETERS, "tenant_id": TENANT})
            query = EmailQuery(
                tenant_id=caller.tenant(given.get("tenant_id")),
                sender=given.get("from"),
                since=given.get("created_from"),
                until=given.get("created_before"),
                **{name: given[name] for name in _SAME_NAMES if name in given},
            )
            limit = given.get("limit", DEFAULT_PAGE_EMAILS)
            async with self.listing.turn(caller.share):
                found = await find(self.source, query, limit=limit, cursor=given.get("cursor"), is_sealed=True)
        page = {
            "emails": [document(email) for email in found.rows],
            "next": found.cursor,
            "recipients_since": found.recipients_since,
        }
        return Response(orjson.dumps(page), media_type="application/json")

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


def document(email: EmailRow | FoundEmail) -> dict[str, Any]:
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
