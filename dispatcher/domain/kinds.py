"""Kinds of values: each reads a value from text or JSON, and states its limits in one sentence and in JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from dispatcher.domain import email_rules
from dispatcher.domain.controls import MAX_LIMIT, MIN_LIMIT
from dispatcher.domain.email_json import instant_of
from dispatcher.domain.instant import parse_instant, parse_length
from dispatcher.errors import InvalidEmail

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

_UNPRINTABLE: Final = (
    r"\x00-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\uffff"
)
NOT_BLANK: Final = rf"^ *[^ {_UNPRINTABLE}][^{_UNPRINTABLE}]*$"


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value.

    Attributes:
        rule: What a value must be: `must be a number from 1 to 10`. Every face refuses with these words.
        schema: The JSON Schema of the value in a request.
        read: Returns the value of a JSON value; raises ValueError or InvalidEmail if it breaks the rule.
        parse: Returns the JSON value of a text on the command line, in a URL or in a form; raises ValueError.
        metavar: What stands for the value in `--help`.
    """

    rule: str
    schema: Mapping[str, Any]
    read: Callable[[Any], T]
    parse: Callable[[str], Any] = str
    metavar: str = "TEXT"
    choices: Collection[str] = ()

    def of_json(self, value: object) -> T:
        """The value; raises ValueError with the rule."""
        try:
            return self.read(value)
        except InvalidEmail as error:
            raise ValueError(error.reason) from None
        except (ValueError, TypeError):
            raise ValueError(self.rule) from None

    def of_text(self, text: str) -> T:
        """The value of a text; raises ValueError with the rule."""
        try:
            found = self.parse(text.strip())
        except ValueError as error:
            words = str(error)
            raise ValueError(words if words.startswith(("is ", "must ")) else self.rule) from None
        return self.of_json(found)


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError


def number(least: float, most: float) -> Kind[float]:
    """A finite number within a range."""

    def read(value: Any) -> float:
        _require(isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most)
        return float(value)

    schema = {"type": "number", "minimum": least, "maximum": most}
    return Kind(f"must be a number from {least:g} to {most:,.0f}", schema, read, float, "N")


def whole(least: int, most: int) -> Kind[int]:
    """A whole number within a range."""

    def read(value: Any) -> int:
        _require(isinstance(value, int) and not isinstance(value, bool) and least <= value <= most)
        return int(value)

    def parse(text: str) -> int:
        _require(text.isascii() and text.isdigit() and len(text) < 20)
        return int(text)

    schema = {"type": "integer", "minimum": least, "maximum": most}
    return Kind(f"must be a whole number from {least:,} to {most:,}", schema, read, parse, "N")


def text(most: int, pattern: str = NOT_BLANK, rule: str = "") -> Kind[str]:
    """A text of at most `most` characters that matches a pattern."""

    def read(value: Any) -> str:
        _require(isinstance(value, str) and 1 <= len(value) <= most and re.fullmatch(pattern, value) is not None)
        return str(value)

    schema = {"type": "string", "minLength": 1, "maxLength": most, "pattern": pattern}
    return Kind(rule or f"must be 1 to {most:,} printable characters", schema, read)


def one_of(values: type[E], *some: str) -> Kind[E]:
    """One of the values of an enum, or one of some of them."""
    names = list(some) or [str(each) for each in values]

    def read(value: Any) -> E:
        _require(value in names)
        return values(value)

    return Kind(f"must be one of: {', '.join(names)}", {"type": "string", "enum": names}, read, choices=names)


def _flag(value: Any) -> bool:
    _require(isinstance(value, bool))
    return bool(value)


def _ids(value: Any) -> tuple[UUID, ...]:
    _require(isinstance(value, list) and 1 <= len(value) <= 1000 and all(isinstance(each, str) for each in value))
    return tuple(map(UUID, value))


def _send_at(value: Any) -> datetime:
    return email_rules.instant("send_at", instant_of("send_at", value))


FLAG: Final[Kind[bool]] = Kind(
    "must be true or false", {"type": "boolean", "default": False}, _flag, lambda text: text == "true", ""
)
_UUIDS: Final = {"type": "array", "minItems": 1, "maxItems": 1000, "items": {"type": "string", "format": "uuid"}}
IDS: Final[Kind[tuple[UUID, ...]]] = Kind("must be a list of 1 to 1,000 email ids (UUIDs)", _UUIDS, _ids, str.split)
SEND_AT: Final[Kind[datetime]] = Kind(
    "must be a date and time with a zone, such as 2026-12-24T18:00:00+01:00, at most 366 days ahead",
    {"type": "string", "format": "date-time"},
    _send_at,
    metavar="TIME",
)


LIMIT: Final = number(MIN_LIMIT, MAX_LIMIT)
TENANT: Final = Kind(
    f"must be 1 to {email_rules.MAX_TENANT_CHARACTERS} of A-Z a-z 0-9 . _ : - and begin with a letter or digit",
    {
        "type": "string",
        "minLength": 1,
        "maxLength": email_rules.MAX_TENANT_CHARACTERS,
        "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]*$",
    },
    email_rules.tenant,
    metavar="TENANT",
)
AGE: Final[Kind[float]] = Kind(
    "must be a length of time such as 90s, 15m, 2h, 3d or 1w",
    {"type": "number", "minimum": 0, "maximum": 10 * 366 * 86_400},
    number(0, 10 * 366 * 86_400).read,
    parse_length,
    "AGE",
)
FILTER_TEXT: Final = text(255)
REASON: Final = text(500, rule="must be 1 to 500 printable characters that say why")
SECONDS: Final[Kind[float]] = Kind(
    "must be a length of time such as 90s, 15m, 2h, 3d or 1w, at most 366 days",
    {"type": "number", "exclusiveMinimum": 0, "maximum": 366 * 86_400},
    number(1e-9, 366 * 86_400).read,
    parse_length,
    "TIME",
)
INSTANT: Final[Kind[datetime]] = Kind(
    "must be a time in ISO 8601, such as 2026-11-21T10:00:00Z", {"type": "string", "format": "date-time"}, parse_instant
)
