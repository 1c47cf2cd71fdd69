"""Reads times, and lengths of time, that people and programs write."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_MAX_SECONDS: Final = 36_500 * 86_400
"""The longest length of time that is allowed: a hundred years. PostgreSQL and Python can subtract it from any current
time."""
_LENGTH: Final = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)([smhdw])", re.ASCII)


def parse_length(text: str) -> float:
    """A length of time such as `90s`, `15m`, `2h`, `3d`, `1w`, in seconds. Raises ValueError with a predicate, such as
    `is not a length of time`."""
    found = _LENGTH.fullmatch(text.strip())
    if found is None:
        raise ValueError("is not a length of time. For example, write 90s, 15m, 2h, 3d or 1w")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > _MAX_SECONDS:
        raise ValueError("is more than 36,500 days")
    return seconds


def read_instant(text: str) -> datetime:
    """Parses a time in ISO 8601. A time without a zone counts as UTC. Raises ValueError with a predicate.

    The result is not converted to UTC. In UTC, its year may be outside Python's range of 1 to 9999.
    """
    try:
        found = datetime.fromisoformat(text.upper())
    except ValueError:
        raise ValueError("must be a time in ISO 8601, such as 2026-11-21T10:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def parse_instant(text: str) -> datetime:
    """Like `read_instant`, but converts the time to UTC. Raises ValueError also if its year in UTC is outside 1 to
    9999: PostgreSQL could store such a time, but Python could not read it back."""
    try:
        return read_instant(text).astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a time in ISO 8601, such as 2026-11-21T10:00:00Z") from None
