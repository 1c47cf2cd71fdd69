"""The endpoints about suppressed recipients: list, add, remove. `ops/suppressions.py` does the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from dispatcher.api.access import AccessControl
from dispatcher.api.body_reader import BodyReader
from dispatcher.api.fair_limiter import FairSessions
from dispatcher.api.operator_endpoints import DECISION, INSTANT, Check, act_of, json_response, operator_request
from dispatcher.api.problems import FieldError, Problem
from dispatcher.api.status_endpoints import TENANT, Parameter, limit_of, parameters
from dispatcher.domain.api_key import Scope
from dispatcher.domain.instant import parse_instant
from dispatcher.domain.suppression import Recipient, SuppressionReason
from dispatcher.errors import InvalidEmail
from dispatcher.ops import suppressions
from dispatcher.store.suppressions import Suppression, list_suppressions

MAX_RECIPIENTS: Final = 1000
MAX_STOPPED: Final = 1000
"""The most ids of stopped emails in a response. `POST /v1/replays` accepts the same number of ids."""
MAX_NOTE_CHARACTERS: Final = 500
DEFAULT_PAGE: Final = 50
MAX_PAGE: Final = 200
_LARGEST_ID: Final = 2**63 - 1


def _kind(text: str) -> SuppressionReason:
    try:
        return SuppressionReason(text)
    except ValueError:
        raise ValueError(f"must be one of: {', '.join(SuppressionReason)}") from None


def _cursor(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > _LARGEST_ID:
        raise ValueError("must be the `next` of a previous page")
    return int(text)


PARAMETERS: Final[Mapping[str, Parameter]] = {
    "kind": Parameter(_kind, {"type": "string", "enum": list(SuppressionReason)}, "Only entries of this kind."),
    "cursor": Parameter(
        _cursor, {"type": "integer", "minimum": 0, "maximum": _LARGEST_ID}, "The `next` of the previous page."
    ),
    "limit": Parameter(
        limit_of,
        {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
        "The most entries per page.",
    ),
}


def _are_texts(value: object) -> bool:
    return (
        isinstance(value, list) and 1 <= len(value) <= MAX_RECIPIENTS and all(isinstance(item, str) for item in value)
    )


def _is_note(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NOTE_CHARACTERS and value.isprintable()


_REQUIRED: Final = ("reason", "recipients")
_REMOVAL: Final[Mapping[str, tuple[Check, str]]] = {
    **DECISION,
    "recipients": (_are_texts, f"must be a list of 1 to {MAX_RECIPIENTS:,} addresses or domains"),
}
_ADDITION: Final[Mapping[str, tuple[Check, str]]] = {
    **_REMOVAL,
    "kind": (lambda value: value in tuple(SuppressionReason), f"must be one of: {', '.join(SuppressionReason)}"),
    "note": (_is_note, f"must be at most {MAX_NOTE_CHARACTERS} printable characters"),
    "expires_at": INSTANT,
}


@dataclass(frozen=True, slots=True)
class SuppressionEndpoints:
    """Lists and changes a tenant's suppressed recipients.

    Requests contain addresses only in their bodies, because proxies often log paths and queries.
    """

    access: AccessControl
    bodies: BodyReader
    sessions: FairSessions

    async def list(self, request: Request) -> Response:
        async with self.access.admit(request, Scope.OPERATE) as caller:
            given = parameters(request, {**PARAMETERS, "tenant_id": TENANT})
            limit = given.get("limit", DEFAULT_PAGE)
            async with self.sessions.of(caller.share) as connection:
                entries = await list_suppressions(
                    connection,
                    caller.tenant(given.get("tenant_id")),
                    reason=given.get("kind"),
                    before=given.get("cursor"),
                    limit=limit,
                )
        next_cursor = entries[-1].suppression_id if len(entries) == limit else None
        return json_response({"suppressions": [document(entry) for entry in entries], "next": next_cursor})

    async def add(self, request: Request) -> Response:
        async with (
            operator_request(self.access, self.bodies, request, _ADDITION, _REQUIRED) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            added = await suppressions.add(
                connection,
                caller.tenant(given.get("tenant_id")),
                _recipients(given["recipients"]),
                act_of(caller, given["reason"]),
                reason=SuppressionReason(given.get("kind", SuppressionReason.MANUAL)),
                note=given.get("note"),
                expires_at=parse_instant(given["expires_at"]) if "expires_at" in given else None,
            )
        return json_response({"added": added})

    async def remove(self, request: Request) -> Response:
        """Removes entries, and returns the ids of the emails that these entries had stopped.

        Does not send the emails.
        """
        async with (
            operator_request(self.access, self.bodies, request, _REMOVAL, _REQUIRED) as (caller, given),
            self.sessions.of(caller.share) as connection,
        ):
            tenant, recipients = caller.tenant(given.get("tenant_id")), _recipients(given["recipients"])
            removed = await suppressions.remove(connection, tenant, recipients, act_of(caller, given["reason"]))
            stopped = await suppressions.find_stopped(connection, tenant, recipients)
        return json_response(
            {"removed": removed, "stopped_count": len(stopped), "stopped_email_ids": stopped[:MAX_STOPPED]}
        )


def _recipients(texts: list[str]) -> list[Recipient]:
    found, errors = [], []
    for index, text in enumerate(texts):
        try:
            found.append(Recipient.parse(text))
        except InvalidEmail as error:
            errors.append(FieldError("pointer", f"#/recipients/{index}", error.reason))
    if errors:
        raise Problem("invalid-body", errors=errors)
    return found


def document(entry: Suppression) -> dict[str, Any]:
    """The JSON object of a suppression entry, without the hash of the address."""
    fields = asdict(entry)
    del fields["address_hash"]
    return {
        "id": fields.pop("suppression_id"),
        "recipient": fields.pop("masked"),
        "kind": fields.pop("reason"),
        **fields,
    }
