"""Reads the filter of the pages Dead letters, Held and Replays from their URLs and forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from starlette.requests import Request

from dispatcher.api.ops_page import fields
from dispatcher.api.ops_page.fields import Mistake
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.status import Status
from dispatcher.store.failures import Selection

STATUSES: Final = (Status.FAILED, Status.HELD)
LABELS: Final = {
    "status": "Status",
    "error_type": "Error type",
    "provider": "Provider",
    "channel": "Channel",
    "tenant": "Tenant",
    "text": "Words of the error",
    "tag": "Tag",
    "older": "Older than",
    "newer": "Newer than",
}
"""The fields of a filter, and their labels."""
MAX_CHARACTERS: Final = 200
_LONGEST_SECONDS: Final = 3650 * 86_400.0


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """A filter for failed and held emails.

    Attributes:
        typed: The fields that are not empty, as the visitor typed them.
        selection: The emails that the filter selects. If the visitor sees only one tenant, only emails of this tenant.
    """

    typed: Mapping[str, str]
    selection: Selection


def read_filter(visitor: Visitor, given: Mapping[str, str]) -> DeadFilter:
    """Reads the filter in the parameters of a URL or the fields of a form.

    Raises:
        PageError: The visitor may not see the tenant.
        Mistake: A field has an invalid value.
    """
    typed = {name: text for name in LABELS if (text := given.get(name, "").replace("\0", "").strip())}
    tenant_id = typed.get("tenant")
    if tenant_id is not None or visitor.tenant_id is not None:
        tenant_id = fields.tenant_of(visitor, tenant_id or "")
    for name, text in typed.items():
        if len(text) > MAX_CHARACTERS:
            raise Mistake(f"{LABELS[name]} has more than {MAX_CHARACTERS} characters.")
    status = typed.get("status")
    if status not in (None, *STATUSES):
        raise Mistake("The status must be failed or held.")
    selection = Selection(
        status=None if status is None else Status(status),
        error_type=typed.get("error_type"),
        provider=typed.get("provider"),
        channel=typed.get("channel"),
        tenant_id=tenant_id,
        text=typed.get("text"),
        tag=typed.get("tag"),
        older_than_seconds=fields.length_of(typed, "older", LABELS["older"], most=_LONGEST_SECONDS),
        newer_than_seconds=fields.length_of(typed, "newer", LABELS["newer"], most=_LONGEST_SECONDS),
    )
    return DeadFilter(typed, selection)


def email_id_of(request: Request, name: str) -> UUID | None:
    """The last email of the previous page of a list, from a parameter of the URL; None for the first page.

    Raises:
        PageError: The parameter is not an email id.
    """
    if not (text := fields.parameter(request, name)):
        return None
    try:
        return UUID(text)
    except ValueError:
        raise fields.wrong_cursor() from None
