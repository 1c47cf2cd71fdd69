"""Reads the fields of filters and forms. A page shows a `Mistake` together with the form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, tzinfo
from typing import Any, Final

from starlette.datastructures import ImmutableMultiDict
from starlette.requests import Request

from dispatcher.actions.action import Action
from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.api.ops_page.zones import with_zone
from dispatcher.domain.instant import parse_instant
from dispatcher.domain.kinds import AGE, INSTANT, SEND_AT, SINCE
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act

MAX_REASON_CHARACTERS: Final = 500
PAGE_SIZES: Final = ("25", "50", "100")
_PAGE_NAMES: Final = {
    "created_from": "since",
    "newer_than_seconds": "since",
    "created_before": "until",
    "older_than_seconds": "until",
    "tenant_id": "tenant",
}
"""Fields of filters that the page names otherwise, so that a name means the same in every address."""
_OTHER_PARAMETERS: Final = frozenset({"back", "by", "creating", "done", "include_held", "q", "removed", "view"})
"""Parameters of addresses that are no filters."""


class Mistake(Exception):
    """A field of a form has an invalid value. The text is a sentence for the visitor, without private values."""


def all_tenants_only(visitor: Visitor) -> None:
    """For a visitor who sees only one tenant, the page does not exist."""
    if visitor.tenant_id is not None:
        raise PageError(404, "There is no page at this address.", "Use the navigation.")


def act_of(visitor: Visitor, form: Mapping[str, str]) -> Act:
    """The visitor's act for the audit log, with the form's reason, which is required."""
    try:
        return visitor.act(form.get("reason", "")[:MAX_REASON_CHARACTERS])
    except DispatcherError as error:
        raise Mistake(f"{error.message} {error.remedy or ''}".strip()) from None


def page_name(name: str) -> str:
    """The name of a field in addresses of the page. The field's own name works, too."""
    return _PAGE_NAMES.get(name, name)


def typed(given: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The fields of a filter, as they were typed: for each, the last text that is not blank. Leaves out the others, and
    a number of rows that the page does not offer."""
    every = given if isinstance(given, ImmutableMultiDict) else ImmutableMultiDict(given)
    found = {}
    for name in names:
        texts = [text for each in (name, page_name(name)) for text in every.getlist(each)]
        clean = [text.replace("\0", "").strip() for text in texts]
        if (text := next((each for each in reversed(clean) if each), "")) and (name != "limit" or text in PAGE_SIZES):
            found[name] = text
    return found


def as_texts(action: type[Action[Any]], filters: Mapping[str, str], zone: tzinfo) -> dict[str, str]:
    """The texts from which the action is read. A time without a zone is in the visitor's zone; a field that is an age
    also takes a time."""
    found = dict(filters)
    for name in filters:
        kind = action.fields[name].kind
        if kind in (SINCE, AGE, INSTANT, SEND_AT):
            found[name] = with_zone(found[name], zone)
        if kind is AGE and "-" in found[name]:
            with suppress(ValueError):
                found[name] = f"{max(1, round((datetime.now(UTC) - parse_instant(found[name])).total_seconds()))}s"
    return found


def note_unknown(request: Request, names: Iterable[str]) -> None:
    """Makes the page say so if its address has a parameter that is neither one of these fields nor known otherwise."""
    names = [*names]
    if set(request.query_params) - {*names, *map(page_name, names)} - _OTHER_PARAMETERS:
        request.state.filters = [page_name(name) for name in names if name not in ("after", "limit")]


def parameter(request: Request, name: str) -> str:
    """A parameter of the URL, without white space around its value; empty if the parameter is missing."""
    return request.query_params.get(name, "").replace("\0", "").strip()


def chosen(request: Request) -> dict[str, str]:
    """The parameters of the URL, with all chosen emails in one. Raises PageError if none of a list's emails is chosen:
    without ids, a filter would select all of them."""
    given = dict(request.query_params)
    ids = ",".join(each for each in request.query_params.getlist("email_ids") if each.strip(" ,"))
    if given.pop("chosen", "") and not ids:
        raise PageError(400, "No email is chosen.", "Go back, and choose emails in the first column of the list.")
    return given | ({"email_ids": ids} if ids else {})


def counted(text: str) -> int | None:
    """A small number, such as how many rows a form has changed; None if the text is missing or not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
