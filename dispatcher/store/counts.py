"""How many emails have each status, for people and programs that ask; never a scan of what was sent."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession, Session, translated
from dispatcher.store.queries import query
from dispatcher.store.statements import fetch, fetch_sync


@dataclass(frozen=True, slots=True)
class Counts:
    """The emails at one instant.

    Attributes:
        emails: Emails by status, every status named.
        oldest_pending_seconds: Age of the oldest pending email; None if none is pending.
        longest_due_seconds: How long a message has been waiting to be published; None if none is due.
    """

    emails: dict[Status, int]
    oldest_pending_seconds: float | None
    longest_due_seconds: float | None


@dataclass(frozen=True, slots=True)
class Stock(Counts):
    """What the monitor reads again and again; its `emails` leave out `sent`.

    Attributes:
        sent_last_hour: About; hours are counted as wholes.
        sent_last_day: The same for 24 hours.
    """

    sent_last_hour: float
    sent_last_day: float


def count_emails(connection: Session) -> Counts:
    """The counts, all of one instant."""
    with translated(), connection.transaction():
        connection.execute(query("begin_snapshot"))
        unfinished: dict[str, int] = dict(fetch_sync(connection, "count_unfinished"))
        sent = fetch_sync(connection, "count_sent")
        (oldest,) = fetch_sync(connection, "find_oldest_pending")
    emails = {status: unfinished.get(status, 0) for status in Status}
    return Counts(emails | {Status.SENT: sent[0][0]}, *oldest)


async def take_stock(session: AsyncSession) -> Stock:
    """The counts that the monitor reports."""
    unfinished: dict[str, int] = dict(await fetch(session, "count_unfinished"))
    (oldest,) = await fetch(session, "find_oldest_pending")
    (sent,) = await fetch(session, "count_sent_recently")
    emails: dict[Status, int] = {status: unfinished.get(status, 0) for status in Status if status is not Status.SENT}
    return Stock(emails, *oldest, *sent)
