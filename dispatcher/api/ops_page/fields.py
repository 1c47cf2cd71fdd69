"""Reads the fields of filters and forms. A page shows a `Mistake` together with the form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request

from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act

MAX_REASON_CHARACTERS: Final = 500


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


def parameter(request: Request, name: str) -> str:
    """A parameter of the URL, without white space around its value; empty if the parameter is missing."""
    return request.query_params.get(name, "").replace("\0", "").strip()


def counted(text: str) -> int | None:
    """A small number, such as how many rows a form has changed; None if the text is missing or not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
