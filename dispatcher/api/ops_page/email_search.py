"""The search form of the page Emails: guesses whether a visitor's text is an address, a key or an id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, tzinfo
from enum import StrEnum
from typing import Final
from uuid import UUID

from dispatcher.actions.action import Mistakes, read
from dispatcher.actions.emails import ListEmails
from dispatcher.api.ops_page import fields
from dispatcher.domain.address import parse_address

MAX_CHARACTERS: Final = 998
"""The longest text of the search field: longer than any address, key or id."""


class By(StrEnum):
    """What the visitor's search text is, such as an address or an id. `ANYTHING`: the search guesses."""

    ANYTHING = "anything"
    RECIPIENT = "recipient"
    DOMAIN = "domain"
    KEY = "key"
    ID = "id"
    CORRELATION = "correlation"
    ERROR = "error"


NAMES: Final[Mapping[By, str]] = {
    By.ANYTHING: "anything",
    By.RECIPIENT: "a recipient's address",
    By.DOMAIN: "a recipient's domain",
    By.KEY: "a message key",
    By.ID: "an email id",
    By.CORRELATION: "a correlation id",
    By.ERROR: "words of an error",
}


@dataclass(frozen=True, slots=True)
class SearchForm:
    """A search, read from the parameters of a URL: the fields as typed, what is wrong with each, and what they select.

    `text` is that of the search field; empty if only the filters select emails.
    """

    typed: Mapping[str, str]
    errors: Mapping[str, str]
    text: str
    by: By
    filters: ListEmails

    @property
    def kinds(self) -> tuple[By, ...]:
        """The kinds that the text can be, in the order in which the search tries them. Empty without a text."""
        if not self.text:
            return ()
        return guess(self.text) if self.by is By.ANYTHING else (self.by,)

    @property
    def parameters(self) -> dict[str, str]:
        return {name: text for name, text in self.typed.items() if name != "after"}

    def wanted(self, kind: By) -> ListEmails:
        """The search for emails that match both the filters and the text, which is of this kind."""
        names = {By.RECIPIENT: "recipient", By.DOMAIN: "domain", By.CORRELATION: "correlation_id", By.ERROR: "text"}
        return self.filters.but(**{names[kind]: self.text.removeprefix("@") if kind is By.DOMAIN else self.text})


def guess(text: str) -> tuple[By, ...]:
    """The kinds that a text can be, the most likely first. A text such as `@example.com` can only be a domain; every
    other text can also be a key or a correlation id, and a text that is no address can be words of an error."""
    if as_id(text) is not None:
        return By.ID, By.KEY, By.CORRELATION
    if text.startswith("@") and is_domain(text[1:]):
        return (By.DOMAIN,)
    if _is_address(text):
        return By.RECIPIENT, By.KEY, By.CORRELATION
    if is_domain(text):
        return By.KEY, By.DOMAIN, By.CORRELATION, By.ERROR
    return By.KEY, By.CORRELATION, By.ERROR


def as_id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def is_domain(text: str) -> bool:
    return "." in text and _is_address(f"a@{text}") and not text.rpartition(".")[2].isdigit()


def _is_address(text: str) -> bool:
    try:
        return bool(parse_address(text))
    except ValueError:
        return False


def read_form(given: Mapping[str, str], *, tenant_id: str | None, zone: tzinfo = UTC) -> SearchForm:
    """Reads the parameters of a URL. Ignores unknown parameters, and the tenant if the visitor has one of its own."""
    names = [name for name in ListEmails.fields if tenant_id is None or name != "tenant_id"]
    typed = {name: text[: MAX_CHARACTERS + 1] for name, text in fields.typed(given, ("q", "by", *names)).items()}
    text, chosen, errors, filters = typed.get("q", ""), typed.get("by", By.ANYTHING.value), {}, ListEmails()
    texts = {name: text for name, text in typed.items() if name in names}
    try:
        filters = read(ListEmails, {}, fields.as_texts(ListEmails, texts, zone))
        filters.check(None)
    except Mistakes as error:
        errors = {each.field: f"{each.rule}." for each in error.mistakes}
    if chosen not in tuple(By):
        errors["by"] = f"must be one of: {', '.join(By)}."
        chosen = By.ANYTHING.value
    if fault := _fault_of(text, By(chosen)):
        errors["q"] = fault
    return SearchForm(typed, errors, text, By(chosen), filters.but(tenant_id=tenant_id or filters.tenant_id))


def _fault_of(text: str, by: By) -> str | None:
    """Why the text cannot be of the kind that the visitor chose; None if it can be."""
    if not text.isprintable():
        return "contains a character that is not printable. Remove it."
    if len(text) > MAX_CHARACTERS:
        return f"is longer than {MAX_CHARACTERS} characters."
    if not text:
        return None
    if by is By.ID and as_id(text) is None:
        return "is not an email id. An id looks like 0199c0de-0000-7000-8000-000000000000."
    if by is By.RECIPIENT and not _is_address(text):
        return "is not an address. Type the whole address, such as ann@example.org."
    if by is By.DOMAIN and not is_domain(text.removeprefix("@")):
        return "is not a domain. A domain looks like example.org."
    return None
