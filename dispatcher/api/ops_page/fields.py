"""Reads the fields of filters and forms. A page shows a `Mistake` together with the form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request

from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.email_rules import tenant
from dispatcher.errors import DispatcherError, InvalidEmail
from dispatcher.ops.acts import Act

MAX_REASON_CHARACTERS: Final = 500
DEFAULT_TENANT: Final = "default"
_LARGEST_NUMBER: Final = 2**63 - 1


class Mistake(Exception):
    """Raised if a field of a form has an invalid value.

    The error's text is a sentence for the visitor, without private values.
    """


def all_tenants_only(visitor: Visitor) -> None:
    """Checks that a visitor sees all tenants.

    Raises:
        PageError: The visitor sees only one tenant. The error says that the page does not exist.
    """
    if visitor.tenant_id is not None:
        raise PageError(404, "There is no page at this address.", "Use the navigation.")


def act_of(visitor: Visitor, form: Mapping[str, str]) -> Act:
    """The visitor's act for the audit log, with the form's reason.

    Raises:
        Mistake: The reason is missing.
    """
    try:
        return visitor.act(form.get("reason", "")[:MAX_REASON_CHARACTERS])
    except DispatcherError as error:
        raise Mistake(f"{error.message} {error.remedy or ''}".strip()) from None


def tenant_of(visitor: Visitor, asked: str) -> str:
    """The tenant that a page is about.

    For a visitor who may see only one tenant, this is that tenant. For other visitors, it is the tenant that they ask
    for, or else the default tenant.

    Raises:
        PageError: The visitor may not see the tenant.
        Mistake: No tenant can have this name.
    """
    if visitor.tenant_id is not None:
        if asked not in ("", visitor.tenant_id):
            raise PageError(404, "There is no tenant with this id.", "Remove `tenant` from the address of this page.")
        return visitor.tenant_id
    try:
        return tenant(asked.strip() or DEFAULT_TENANT)
    except InvalidEmail as error:
        raise Mistake(f"The tenant's id {error.reason}.") from None


def parameter(request: Request, name: str) -> str:
    """A parameter of the URL, without white space around its value; empty if the parameter is missing."""
    return request.query_params.get(name, "").replace("\0", "").strip()


def number_in_path(request: Request, name: str, what: str) -> int:
    """A number in the request's path.

    Args:
        what: What the number identifies, such as `webhook`, for the error.

    Raises:
        PageError: The text in the path is not a number.
    """
    text = request.path_params[name]
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > _LARGEST_NUMBER:
        raise PageError(404, f"There is no {what} with this id.", "Check the id.")
    return int(text)


def counted_parameter(request: Request, name: str) -> int | None:
    """A small number in the URL, such as how many rows a form has changed; None if it is missing or not a number."""
    text = parameter(request, name)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def number_of(
    form: Mapping[str, str], name: str, label: str, *, least: float = 1, most: float, is_whole: bool = False
) -> float | None:
    """A number in a form; None if the field is empty.

    Raises:
        Mistake: The text is not a number, or the number is out of range.
    """
    text = form.get(name, "").strip()
    if not text:
        return None
    try:
        found = float(int(text)) if is_whole else float(text)
    except ValueError:
        found = 0.0
    if not least <= found <= most:
        kind = "whole number" if is_whole else "number"
        raise Mistake(f"{label} must be a {kind} from {least:g} to {most:,.0f}.")
    return found
