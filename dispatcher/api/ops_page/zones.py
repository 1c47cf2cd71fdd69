"""The time zone in which a visitor reads and types times: the browser's, or UTC. A cookie has its name."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from starlette.requests import Request

ZONE_COOKIE: Final = "dispatcher-ops-zone"
"""The script reads it, too, so it has no prefix and is not HttpOnly. It is no secret."""
_NAME: Final = re.compile(r"[A-Za-z0-9_+/-]{1,64}")


def zone_of(request: Request) -> tzinfo:
    """The zone of the cookie; UTC if there is none, or if this host does not know the zone."""
    return _zone(request.cookies.get(ZONE_COOKIE, ""))


@lru_cache(maxsize=256)
def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name) if name != "UTC" and _NAME.fullmatch(name) else UTC
    except (ValueError, OSError, KeyError):
        return UTC


def in_zone(at: datetime, zone: tzinfo) -> datetime:
    """An instant by the clock of a zone; in UTC, if the zone has no year for it."""
    try:
        return at.astimezone(zone)
    except OverflowError:
        return at.astimezone(UTC)


def with_zone(text: str, zone: tzinfo) -> str:
    """A time as it was typed, in the visitor's zone if it names none; any other text as it is."""
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        return text
    return text if given.tzinfo else given.replace(tzinfo=zone).isoformat()
