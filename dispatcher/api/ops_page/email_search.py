"""The search form of the page Emails: reads a visitor's text, and guesses whether it is an address, a key or an id."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.address import parse_address
from dispatcher.domain.email_rules import MAX_TENANT_CHARACTERS, tenant
from dispatcher.domain.instant import parse_instant
from dispatcher.domain.lanes import LANE
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail
from dispatcher.ops.lookup import EmailQuery

MAX_CHARACTERS: Final = 998
"""The longest text of a field: longer than any address, key or id."""
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGE: Final = re.compile(r"([0-9]{1,6})([smhdw])")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""The earliest instant of a search, because email ids contain no earlier time."""
_NOT_PRINTABLE: Final = "contains a character that is not printable. Remove it."


class By(StrEnum):
    """What the visitor's search text is, such as an address or an id. `ANYTHING`: the search guesses."""

    ANYTHING = "anything"
    RECIPIENT = "recipient"
    DOMAIN = "domain"
    KEY = "key"
    ID = "id"
    CORRELATION = "correlation"


NAMES: Final[Mapping[By, str]] = {
    By.ANYTHING: "anything",
    By.RECIPIENT: "a recipient's address",
    By.DOMAIN: "a recipient's domain",
    By.KEY: "a message key",
    By.ID: "an email id",
    By.CORRELATION: "a correlation id",
}


@dataclass(frozen=True, slots=True)
class SearchForm:
    """A search, read from the parameters of a URL.

    Attributes:
        typed: The fields as the visitor typed them, to fill in the form again.
        errors: What is wrong with each invalid field, by the name of the field.
        text: The text of the search field, without spaces around it; empty if only the filters select emails.
        filters: The query for the other fields of the form, such as the status. `wanted` adds the text.
        cursor: Where this page of the results begins; None for the first page.
    """

    typed: Mapping[str, str]
    errors: Mapping[str, str]
    text: str
    by: By
    filters: EmailQuery
    cursor: UUID | None = None

    @property
    def kinds(self) -> tuple[By, ...]:
        """The kinds that the text can be, in the order in which the search tries them. Empty without a text."""
        if not self.text:
            return ()
        return guess(self.text) if self.by is By.ANYTHING else (self.by,)

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of this search's URL, without its cursor."""
        return {name: text for name, text in self.typed.items() if text and name != "cursor"}

    def wanted(self, kind: By | None) -> EmailQuery:
        """The query for emails that match both the filters and the text.

        If `kind` is not an address, a domain or a correlation id, the query has only the filters.
        """
        match kind:
            case By.RECIPIENT:
                return replace(self.filters, recipient=self.text)
            case By.DOMAIN:
                return replace(self.filters, domain=self.text.removeprefix("@"))
            case By.CORRELATION:
                return replace(self.filters, correlation_id=self.text)
            case _:
                return self.filters


def guess(text: str) -> tuple[By, ...]:
    """The kinds that a text can be, the most likely first. A text such as `@example.com` can only be a domain; every
    other text can also be a key or a correlation id."""
    if as_id(text) is not None:
        return By.ID, By.KEY, By.CORRELATION
    if text.startswith("@") and is_domain(text[1:]):
        return (By.DOMAIN,)
    if _is_address(text):
        return By.RECIPIENT, By.KEY, By.CORRELATION
    if is_domain(text):
        return By.KEY, By.DOMAIN, By.CORRELATION
    return By.KEY, By.CORRELATION


def as_id(text: str) -> UUID | None:
    """The text as an email id; None if the text is not a UUID."""
    try:
        return UUID(text)
    except ValueError:
        return None


def is_domain(text: str) -> bool:
    """Whether the text has the form of a mail domain."""
    return "." in text and _is_address(f"a@{text}") and not text.rpartition(".")[2].isdigit()


def _is_address(text: str) -> bool:
    try:
        return bool(parse_address(text))
    except ValueError:
        return False


def _text(text: str) -> str:
    if not text.isprintable():
        raise ValueError(_NOT_PRINTABLE)
    return text


def _status(text: str) -> Status:
    if text not in tuple(Status):
        raise ValueError(f"must be one of: {', '.join(Status)}.")
    return Status(text)


def _error_type(text: str) -> str:
    if text not in tuple(Reason):
        raise ValueError(f"must be one of: {', '.join(Reason)}.")
    return text


def _tenant(text: str) -> str:
    try:
        return tenant(text)
    except InvalidEmail:
        raise ValueError(
            f"must be 1 to {MAX_TENANT_CHARACTERS} characters of A-Z a-z 0-9 . _ : - and begin with a letter or digit."
        ) from None


def _lane(text: str) -> str:
    if not LANE.fullmatch(text):
        raise ValueError("is not the name of a lane. Examples: urgent, normal, bulk.")
    return text


def _sender(text: str) -> str:
    if not (is_domain(text[1:]) if text.startswith("@") else _is_address(text)):
        raise ValueError("must be an address, or a domain such as @example.com.")
    return text


def instant_or_age(text: str, now: datetime) -> datetime:
    """Converts an age such as `24h` (24 hours before `now`), or a time such as `2026-11-21T10:00:00Z`, to an instant.

    Raises:
        ValueError: The text is neither an age nor an instant. The error's text begins with "must be".
    """
    try:
        if found := _AGE.fullmatch(text.lower()):
            seconds = int(found[1]) * _SECONDS[found[2]]
            return now - timedelta(seconds=min(seconds, (now - _EPOCH).total_seconds()))
        return max(parse_instant(text), _EPOCH)
    except ValueError:
        raise ValueError(
            "must be an age such as 90s, 15m, 24h, 7d or 2w, or a time such as 2026-11-21 10:00."
        ) from None


def _by(text: str) -> By:
    if text not in tuple(By):
        raise ValueError(f"must be one of: {', '.join(By)}.")
    return By(text)


def _cursor(text: str) -> UUID:
    if (found := as_id(text)) is None:
        raise ValueError("does not contain a complete cursor. Begin at the first page.")
    return found


def read_form(given: Mapping[str, str], *, tenant_id: str | None, now: datetime) -> SearchForm:
    """Reads the parameters of a URL. Ignores unknown parameters.

    Args:
        tenant_id: The visitor's tenant, which the visitor cannot change; None if the visitor sees all tenants.
    """
    readers: dict[str, Callable[[str], Any]] = {
        "q": _text,
        "by": _by,
        "status": _status,
        "provider": _text,
        "error_type": _error_type,
        "tag": _text,
        "sender": _sender,
        "lane": _lane,
        "channel": _text,
        "since": lambda text: instant_or_age(text, now),
        "until": lambda text: instant_or_age(text, now),
        "cursor": _cursor,
    }
    if tenant_id is None:
        readers["tenant_id"] = _tenant
    typed = {name: given.get(name, "")[: MAX_CHARACTERS + 1].strip() for name in readers}
    read: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, text in typed.items():
        if len(text) > MAX_CHARACTERS:
            errors[name] = f"is longer than {MAX_CHARACTERS} characters."
            continue
        try:
            read[name] = readers[name](text) if text else None
        except ValueError as error:
            errors[name] = str(error)
    if (since := read.get("since")) and (until := read.get("until")) and until <= since:
        errors["until"] = "must be later than the time in the field Since."
    text, by, cursor = read.pop("q", None) or "", read.pop("by", None) or By.ANYTHING, read.pop("cursor", None)
    if not errors and (fault := _fault_of(text, by)):
        errors["q"] = fault
    known = {"tenant_id": tenant_id} if tenant_id is not None else {}
    return SearchForm(typed, errors, text, by, EmailQuery(**(read | known)), cursor)


def _fault_of(text: str, by: By) -> str | None:
    """Why the text cannot be of the kind that the visitor chose; None if it can be."""
    if not text:
        return None
    if by is By.ID and as_id(text) is None:
        return "is not an email id. An id looks like 0199c0de-0000-7000-8000-000000000000."
    if by is By.RECIPIENT and not _is_address(text):
        return "is not an address. Type the whole address, such as ann@example.org."
    if by is By.DOMAIN and not is_domain(text.removeprefix("@")):
        return "is not a domain. A domain looks like example.org."
    return None
