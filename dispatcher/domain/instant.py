"""Reads times that people and programs write."""

from __future__ import annotations

from datetime import UTC, datetime


def read_instant(text: str) -> datetime:
    """A time in ISO 8601, by default in UTC. In UTC, its year may be outside 1 to 9999.

    Raises:
        ValueError: The text is not such a time. The message is a predicate.
    """
    try:
        found = datetime.fromisoformat(text.upper())
    except ValueError:
        raise ValueError("must be a time in ISO 8601, such as 2026-11-21T10:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def parse_instant(text: str) -> datetime:
    """As `read_instant`, in UTC, with a year from 1 to 9999: PostgreSQL stores years that Python cannot read."""
    try:
        return read_instant(text).astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a time in ISO 8601, such as 2026-11-21T10:00:00Z") from None
