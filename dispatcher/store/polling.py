"""Finds the messages whose end is unknown, for the service that asks providers for it."""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from dispatcher.domain.open_message import Traits
from dispatcher.store.statements import Source, fetch

MAX_SEEN: Final = 1000
"""The most rows that `find_polled` reads."""
MAX_OTHERS: Final = 500
"""A held message to a recipient with more messages than this cannot be identified."""
SLACK_SECONDS: Final = 60.0
"""How much the clocks of the provider and of PostgreSQL may differ."""


class PolledRow(NamedTuple):
    """A message that was sent or held.

    Attributes:
        since: When it became sent or held.
        is_open: Whether a question to the provider can show more.
    """

    email_id: UUID
    since: datetime
    message_id: str | None
    is_held: bool
    is_open: bool


async def find_polled(
    source: Source, provider: str, *, after: datetime | None, youngest_seconds: float, oldest_seconds: float
) -> list[PolledRow]:
    """The messages that became sent or held after an instant, up to MAX_SEEN, the oldest first.

    Args:
        after: None: `oldest_seconds` ago.
        youngest_seconds: Leaves out messages that became sent or held later than this before now.
    """
    parameters = {
        "provider": provider,
        "after": after,
        "youngest_seconds": youngest_seconds,
        "oldest_seconds": oldest_seconds,
        "limit": MAX_SEEN,
    }
    return await fetch(source, "find_polled", parameters, into=PolledRow)


async def find_held_message(source: Source, email_id: UUID) -> Traits | None:
    """What identifies a held message in the provider's list; None if nothing can."""
    parameters = {"email_id": email_id, "slack_seconds": SLACK_SECONDS, "max_others": MAX_OTHERS}
    return next(iter(await fetch(source, "find_held_message", parameters, into=Traits)), None)
