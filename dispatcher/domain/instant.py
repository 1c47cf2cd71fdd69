"""Reads times that people and programs write."""

from __future__ import annotations

from datetime import UTC, datetime


def parse_instant(text: str) -> datetime:
    """A time in ISO 8601, by default in UTC.

    Raises:
        ValueError: The text is not such a time. The message is a predicate.
    """
    try:
        found = datetime.fromisoformat(text.upper())
        # PostgreSQL stores years that Python cannot read, so the time in UTC must have a year from 1 to 9999.
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise ValueError("must be a time in ISO 8601, such as 2026-11-21T10:00:00Z") from None
