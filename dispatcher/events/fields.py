"""Reads fields of providers' events. An unexpected value becomes None or an empty object, and never raises an error.

Providers copy text from other servers and from recipients into events. So any text can contain NUL characters or lone
surrogates, or be megabytes long.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import orjson

from dispatcher.events.contract import EventsUnreadable

MAX_ADDRESS_CHARACTERS: Final = 400
"""No mail server accepts an address, with its display name, that is longer than this."""
_MAX_INSTANT_CHARACTERS: Final = 64
_MAX_TEXT_CHARACTERS: Final = 4096
_UUID_CHARACTERS: Final = 36
_END_OF_TIME: Final = datetime.max.replace(tzinfo=UTC).timestamp() - 86_400
_ENHANCED_CODE: Final = re.compile(r"\b[245]\.\d{1,3}\.\d{1,3}\b", re.ASCII)
_REPLY_CODE: Final = re.compile(r"\b[245]\d\d\b", re.ASCII)


def load_json(text: bytes | bytearray | str) -> Any:
    """Parses JSON. Accepts lone surrogates, control characters and bytes that are not UTF-8.

    orjson alone would refuse the whole text because of one such character in one event. The provider would then repeat
    the whole request, and in the end discard all of its events.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        tolerated = text if isinstance(text, str) else text.decode("utf-8", "replace")
    try:
        # `_whole_number` converts a very long integer to a float, as orjson does. Python's `int` raises an error for
        # thousands of digits.
        return json.loads(tolerated, strict=False, parse_int=_whole_number)
    except (ValueError, RecursionError):
        raise EventsUnreadable("The request is not JSON, or is nested too deep.") from None


def _whole_number(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else float(digits)


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def text(value: object) -> str | None:
    """A non-empty string that can be encoded as UTF-8, cut to a few thousand characters; None for anything else."""
    if not isinstance(value, str) or not value:
        return None
    value = value[:_MAX_TEXT_CHARACTERS]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def detail(*values: object) -> str | None:
    """The values that are non-empty texts, joined with a colon; None if there are none."""
    return ": ".join(filter(None, map(text, values))) or None


def address(value: object) -> str | None:
    """An address, perhaps with a display name; None if the value cannot be an address."""
    found = text(value)
    if found is None or "@" not in found or len(found) > MAX_ADDRESS_CHARACTERS or not found.isprintable():
        return None
    return found


def email_id(value: object) -> UUID | None:
    """The id of an email; None if the value cannot be an id."""
    if not isinstance(value, str) or len(value) != _UUID_CHARACTERS:
        return None
    try:
        return UUID(value)
    except ValueError:
        return None


def code(*values: object) -> str | None:
    """The first enhanced status code in the texts, such as 5.1.1. If there is none, the first SMTP reply code, such as
    550. None if the texts contain no code."""
    found = [each for each in map(text, values) if each]
    for form in (_ENHANCED_CODE, _REPLY_CODE):
        for each in found:
            if match := form.search(each):
                return match[0]
    return None


def epoch(value: object) -> datetime | None:
    """An instant from seconds since 1970; None if the value is not a number or is out of range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _END_OF_TIME:
        return None
    return datetime.fromtimestamp(value, UTC) if math.isfinite(value) else None


def instant(value: object) -> datetime | None:
    """The instant, in UTC, of an ISO 8601 text; None for any other value. A text without a time zone is in UTC."""
    if not isinstance(value, str) or len(value) > _MAX_INSTANT_CHARACTERS:
        return None
    try:
        found = datetime.fromisoformat(value)
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
        return found if 0 <= found.timestamp() < _END_OF_TIME else None
    except (ValueError, OverflowError):
        return None
