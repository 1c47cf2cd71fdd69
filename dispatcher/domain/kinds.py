"""Kinds of values that people and programs give. A kind reads text and JSON, and states its limits in words and schema.

The words are a predicate that follows the field's name, such as `must be true or false`. They never repeat the value.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from dispatcher.domain.controls import MAX_LIMIT, MIN_LIMIT
from dispatcher.domain.instant import parse_instant, parse_length
from dispatcher.domain.text import MAX_METADATA_CHARACTERS, MAX_TENANT_CHARACTERS, METADATA_KEY_PATTERN, TENANT_PATTERN
from dispatcher.domain.values import dataclass
from dispatcher.errors import InvalidEmail

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

_UNPRINTABLE: Final = (
    r"\x00-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff\ufff9-\uffff"
)
NOT_BLANK: Final = rf"^ *[^ {_UNPRINTABLE}][^{_UNPRINTABLE}]*$"
PRINTABLE: Final = rf"^[^{_UNPRINTABLE}]*$"
MAX_SECONDS: Final = 10 * 366 * 86_400
MAX_IDS: Final = 1000
MAX_PAGE_ROWS: Final = 100


class Wrong(ValueError):
    """Every mistake in a value: pairs of a path into the value, such as `3`, and a predicate."""

    def __init__(self, *mistakes: tuple[str, str]) -> None:
        super().__init__("; ".join(rule for _, rule in mistakes))
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value.

    Attributes:
        rule: What a value must be: `must be a number from 1 to 10`. Every face refuses with these words.
        schema: The JSON Schema of the value in a request.
        read: Returns the value of a JSON value; raises ValueError, TypeError, InvalidEmail or `Wrong` otherwise.
        parse: Returns the JSON value of a text on the command line, in a URL or in a form; raises ValueError.
        metavar: The name of the value in `--help`.
        choices: All values, if they are few.
    """

    rule: str
    schema: Mapping[str, Any]
    read: Callable[[Any], T]
    parse: Callable[[str], Any] = str
    metavar: str = "TEXT"
    choices: Collection[str] = ()

    @property
    def is_list(self) -> bool:
        return self.schema.get("type") == "array"

    @property
    def has_lines(self) -> bool:
        """Whether a text of several lines has several values: the option of a command is repeatable."""
        return self.schema.get("type") in ("array", "object")

    @property
    def is_flag(self) -> bool:
        return self.schema.get("type") == "boolean"

    def of_json(self, value: object) -> T:
        """The value of a JSON value; raises `Wrong` with all its mistakes."""
        try:
            return self.read(value)
        except Wrong:
            raise
        except InvalidEmail as error:
            raise Wrong(("", error.reason)) from None
        except (ValueError, TypeError, OverflowError):
            raise Wrong(("", self.rule)) from None

    def of_text(self, text: str) -> T:
        """The value of a text; raises `Wrong` with all its mistakes."""
        try:
            found = self.parse(text.strip())
        except ValueError:
            raise Wrong(("", self.rule)) from None
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
    return Kind(f"must be a number from {least:g} to {most:,.0f}, such as 2.5", schema, read, float, "N")


def whole(least: int, most: int) -> Kind[int]:
    """A whole number within a range. In JSON, `5.0` is the same number as `5`."""

    def read(value: Any) -> int:
        is_whole = value.is_integer() if isinstance(value, float) else isinstance(value, int)
        _require(is_whole and not isinstance(value, bool) and least <= value <= most)
        return int(value)

    def parse(text: str) -> int:
        _require(text.isascii() and text.isdigit() and len(text) < 20)
        return int(text)

    schema = {"type": "integer", "minimum": least, "maximum": most}
    return Kind(f"must be a whole number from {least:,} to {most:,}", schema, read, parse, "N")


def text(most: int, pattern: str = NOT_BLANK, rule: str = "", metavar: str = "TEXT", *, least: int = 1) -> Kind[str]:
    """A text of at most `most` characters that matches a pattern, which begins with `^` and ends with `$`."""

    def read(value: Any) -> str:
        _require(isinstance(value, str) and least <= len(value) <= most and re.fullmatch(pattern, value) is not None)
        return str(value)

    schema = {"type": "string", "minLength": least, "maxLength": most, "pattern": pattern}
    return Kind(rule or f"must be {least} to {most:,} printable characters", schema, read, metavar=metavar)


def one_of(values: type[E], *some: str) -> Kind[E]:
    """One of the values of an enum, or one of some of them."""
    names = list(some) or [str(each) for each in values]

    def read(value: Any) -> E:
        _require(value in names)
        return values(value)

    return Kind(f"must be one of: {', '.join(names)}", {"type": "string", "enum": names}, read, choices=names)


def many(item: Kind[T], most: int, items: str) -> Kind[tuple[T, ...]]:
    """A list. In text, spaces, commas or line ends separate its items. Every wrong item is named by its position."""
    rule = f"must be a list of 1 to {most:,} {items}"

    def read(value: Any) -> tuple[T, ...]:
        _require(isinstance(value, (list, tuple)) and 1 <= len(value) <= most)
        found, mistakes = [], []
        for at, each in enumerate(value):
            try:
                found.append(item.of_json(each))
            except Wrong as wrong:
                mistakes += [(f"{at}/{path}".rstrip("/"), why) for path, why in wrong.mistakes]
        if mistakes:
            raise Wrong(*mistakes)
        return tuple(found)

    def parse_item(text: str) -> Any:
        try:
            return item.parse(text)
        except ValueError:
            return text  # `read` refuses it, and names its position

    def parse(text: str) -> list[Any]:
        return [parse_item(each) for each in re.split(r"[\s,]+", text) if each]

    schema = {"type": "array", "minItems": 1, "maxItems": most, "items": dict(item.schema)}
    return Kind(rule, schema, read, parse, item.metavar)


def seconds(least: float, most: float = MAX_SECONDS, *, metavar: str = "TIME") -> Kind[float]:
    """A length of time: a number of seconds in JSON, and for people a text such as `2h`."""
    first, days = f"{least:g} second{'' if least == 1 else 's'}", f"{most / 86_400:,.0f} days"
    rule = f"must be a length of time such as 90s, 15m, 2h or 3d, from {first} to {days}"
    schema = {"type": "number", "minimum": least, "maximum": most}
    return Kind(rule, schema, number(least, most).read, parse_length, metavar)


def cursor(columns: Iterable[type[Any]]) -> Kind[str]:
    """A cursor of a list whose order is that of these columns (see `cursor_values`)."""
    types = tuple(columns)

    def read(value: Any) -> str:
        cursor_values(types, CURSOR_TEXT.read(value))
        return str(value)

    return Kind("must be `next` of an earlier page", CURSOR_TEXT.schema, read, metavar="CURSOR")


def cursor_text(values: Iterable[object]) -> str:
    """The cursor after a row, from the row's values in the columns of the order."""
    return urlsafe_b64encode(json.dumps([str(each) for each in values]).encode()).decode().rstrip("=")


def cursor_values(types: Iterable[type[Any]], text: str) -> list[Any]:
    """The values of a cursor; raises ValueError if the text is not a cursor of such columns."""
    kinds = tuple(types)
    try:
        found = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except RecursionError:
        raise ValueError from None
    _require(isinstance(found, list) and len(found) == len(kinds) and all(isinstance(each, str) for each in found))
    made = [
        kind.fromisoformat(each) if kind is datetime else kind(each) for kind, each in zip(kinds, found, strict=True)
    ]
    _require(all(not isinstance(each, int) or abs(each) < 2**63 for each in made))
    _require(all("\0" not in each for each in found))
    return made


def _flag(value: Any) -> bool:
    _require(isinstance(value, bool))
    return bool(value)


def _tenant(value: object) -> str:
    from dispatcher.domain.email_rules import tenant  # loads the rules of addresses, which few commands need

    return tenant(value)


def _send_at(value: Any) -> datetime:
    from dispatcher.domain.email_json import instant_of
    from dispatcher.domain.email_rules import instant

    return instant("send_at", instant_of("send_at", value))


def _instant(value: Any) -> datetime:
    _require(isinstance(value, str))
    return parse_instant(value)


def _since(value: Any) -> datetime:
    _SINCE_TEXT.read(value)
    with suppress(ValueError):
        return datetime.now(UTC) - timedelta(seconds=parse_length(value))
    with suppress(ValueError):
        return parse_instant(value)
    return parse_instant(value.replace(" ", "+"))  # in a URL, `+` means a space


def _uuid(value: Any) -> UUID:
    _require(isinstance(value, str))
    return UUID(value)


_INSTANT: Final = {"type": "string", "format": "date-time"}
FLAG: Final[Kind[bool]] = Kind(
    "must be true or false",
    {"type": "boolean"},
    _flag,
    lambda text: {"true": True, "on": True, "false": False}[text] if text in ("true", "on", "false") else text,
    "",
)
TENANT: Final = Kind(
    f"must be 1 to {MAX_TENANT_CHARACTERS} of A-Z a-z 0-9 . _ : - and begin with a letter or digit",
    {"type": "string", "minLength": 1, "maxLength": MAX_TENANT_CHARACTERS, "pattern": f"^{TENANT_PATTERN}$"},
    _tenant,
    metavar="TENANT",
)
REASON: Final = text(500, rule="must be 1 to 500 printable characters that say why")
FILTER_TEXT: Final = text(255)
METADATA: Final = text(
    400,
    rf"^{METADATA_KEY_PATTERN}=[^{_UNPRINTABLE}]{{1,{MAX_METADATA_CHARACTERS}}}$",
    "must be a key and its value, such as order=4711",
    "KEY=VALUE",
)
CURSOR_TEXT: Final = text(1000, "^[A-Za-z0-9_-]+$")
"""What every cursor is: base64url. A list refuses cursors of other lists, too."""
LIMIT: Final = number(MIN_LIMIT, MAX_LIMIT)
PAGE_ROWS: Final = whole(1, MAX_PAGE_ROWS)
AGE: Final = seconds(1, metavar="AGE")
EMAIL_ID: Final = Kind("must be an email id (a UUID)", {"type": "string", "format": "uuid"}, _uuid, metavar="ID")
EMAIL_IDS: Final = many(EMAIL_ID, MAX_IDS, "email ids (UUIDs)")
INSTANT: Final[Kind[datetime]] = Kind(
    "must be a time in ISO 8601, such as 2026-11-21T10:00:00Z", _INSTANT, _instant, metavar="TIME"
)
_SINCE_TEXT: Final = text(40, r"^(?:[0-9.]{1,25}[smhdw]|[0-9]{4}[-0-9Ww][-+.,:0-9A-Za-z ]+)$", least=2)
SINCE: Final = Kind(
    "must be an age such as 90s, 2h or 3d, or a time such as 2026-11-21T10:00Z",
    _SINCE_TEXT.schema,
    _since,
    metavar="AGE|TIME",
)
SEND_AT: Final = Kind(
    "must be a date and time with a zone, such as 2026-12-24T18:00:00+01:00, at most 366 days ahead",
    _INSTANT,
    _send_at,
    metavar="TIME",
)
