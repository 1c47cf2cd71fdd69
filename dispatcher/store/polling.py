"""Finds sent and held messages, for the service that asks providers for the messages' final results.

Here, a message is a row of a channel other than email, such as an SMS.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from dispatcher.domain.open_message import Traits
from dispatcher.store.statements import Source, fetch

MAX_SEEN: Final = 1000
"""The most rows that `find_polled` reads."""
MAX_OTHERS: Final = 500
"""If the recipient of a held message has more messages than this, the held message cannot be identified."""
SLACK_SECONDS: Final = 60.0
"""How much the clocks of the provider and of PostgreSQL may differ."""


class PolledRow(NamedTuple):
    """A message that is sent or held.

    Attributes:
        since: When the message became sent or held.
        message_id: The provider's id of the message; None if unknown.
        is_open: Whether to ask the provider: no event has reported the final result, and the message is held or has a
            provider's id.
    """

    email_id: UUID
    since: datetime
    message_id: str | None
    is_held: bool
    is_open: bool


async def find_polled(
    source: Source, provider: str, *, after: datetime | None, youngest_seconds: float, oldest_seconds: float
) -> list[PolledRow]:
    """Up to MAX_SEEN messages that became sent or held after an instant, oldest first.

    Args:
        after: The instant; None for `oldest_seconds` ago.
        youngest_seconds: Leaves out messages that became sent or held less than this many seconds ago.
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
    """The traits that identify a held message in the provider's list; None if the message cannot be identified."""
    parameters = {"email_id": email_id, "slack_seconds": SLACK_SECONDS, "max_others": MAX_OTHERS}
    return next(iter(await fetch(source, "find_held_message", parameters, into=Traits)), None)
