"""Finds sent and held messages, for the service that asks providers for the messages' final results.

Here, a message is a row of a channel other than email, such as an SMS.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from dispatcher.domain.event import Traits
from dispatcher.store.statements import Source, statement

MAX_SEEN: Final = 1000
"""The most rows that `find_polled` reads."""
MAX_OTHERS: Final = 500
"""If the recipient of a held message has more messages than this, the held message cannot be identified."""
SLACK_SECONDS: Final = 60.0
"""How much the clocks of the provider and of PostgreSQL may differ."""


class PolledRow(NamedTuple):
    """A message that is sent or held."""

    email_id: UUID
    since: datetime
    message_id: str | None
    is_held: bool
    is_open: bool  # whether to ask the provider; see `find_polled`


@statement
async def find_polled(
    source: Source,
    provider: str,
    *,
    after: datetime | None,
    youngest_seconds: float,
    oldest_seconds: float,
    limit: int = MAX_SEEN,
) -> list[PolledRow]: ...
@statement
async def find_held_message(
    source: Source, email_id: UUID, *, slack_seconds: float = SLACK_SECONDS, max_others: int = MAX_OTHERS
) -> Traits | None: ...
