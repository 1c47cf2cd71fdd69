"""What the monitor reads again and again: where emails stand that are not finished well, and what was sent lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import query

COUNTED: Final[tuple[Status, ...]] = tuple(status for status in Status if status is not Status.SENT)
"""What is sent is never counted row by row."""


@dataclass(frozen=True, slots=True)
class Stock:
    """The books at one instant.

    Attributes:
        emails: Emails by status, `sent` left out.
        oldest_pending_seconds: Age of the oldest pending email; None if none is pending.
        longest_due_seconds: How long a message has been waiting to be published; None if none is due.
        sent_last_hour: About; hours are counted as wholes.
        sent_last_day: The same for 24 hours.
    """

    emails: dict[Status, int]
    oldest_pending_seconds: float | None
    longest_due_seconds: float | None
    sent_last_hour: float
    sent_last_day: float


async def take_stock(session: AsyncSession) -> Stock:
    """The books, without a scan of what was sent. Faults are ours (see `store.connections.translated`)."""
    with translated():
        counted = await (await session.execute(query("count_unfinished"))).fetchall()
        oldest = await (await session.execute(query("find_oldest_pending"))).fetchone()
        sent = await (await session.execute(query("count_sent_recently"))).fetchone()
    by_status: dict[str, int] = dict(counted)
    pending_seconds, due_seconds = oldest or (None, None)
    last_hour, last_day = sent or (0.0, 0.0)
    emails = {status: by_status.get(status.value, 0) for status in COUNTED}
    return Stock(emails, pending_seconds, due_seconds, last_hour, last_day)
