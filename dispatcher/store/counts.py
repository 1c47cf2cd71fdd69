"""The number of emails by status, for operators and monitoring. Never scans the sent emails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dispatcher.domain.controls import Pause
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass
from dispatcher.store.connections import AsyncSession, Session, translated
from dispatcher.store.controls import list_pauses
from dispatcher.store.named_locks import RELAY_BLOCKED, is_held_by_another
from dispatcher.store.queries import query
from dispatcher.store.statements import Source, statement

_UNCOUNTED: Final = frozenset({Status.SENT, Status.CANCELLED})
"""The statuses whose emails the monitor does not count in the table, because there may be millions. Metrics count these
emails when they get the status."""

READ_PENDING: Final = 100_000
"""The most pending emails, and the most due emails, that are read to find the oldest email that no operator paused."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of emails at one instant.

    Attributes:
        emails: Number of emails by status. Contains every status.
        oldest_pending_seconds: The longest time that a pending email has waited since it could first be sent; None if
            no email is pending. Emails that wait for a later time, or that an operator paused, do not count.
        longest_due_seconds: The longest time that an email has been due without being published; None if no email is
            due. Emails that an operator paused do not count.
    """

    emails: dict[Status, int]
    oldest_pending_seconds: float | None
    longest_due_seconds: float | None


@dataclass(frozen=True, slots=True)
class MonitorCounts(Counts):
    """The counts that the monitor reads at intervals; `emails` leaves out `sent` and `cancelled`.

    Attributes:
        sent_last_hour: Approximate number of emails sent in the last 60 minutes, from counts per clock hour. Example:
            at 10:15, this is the count since 10:00, and three quarters of the count from 9:00 to 10:00.
        webhook_lag_seconds: For each active webhook, by id: the age of the oldest event that was not delivered; 0 if
            every event was. Refused events that were stored for a retry do not count.
        is_blocked: Whether RabbitMQ blocks the leading relay's messages because of a memory or disk alarm.
    """

    sent_last_hour: float
    sent_last_day: float
    webhook_lag_seconds: dict[int, float]
    pauses: Sequence[Pause] = ()
    is_blocked: bool = False


def count_emails(connection: Session) -> Counts:
    """Counts the emails. All counts are from one snapshot."""
    with translated(), connection.transaction():
        connection.execute(query("begin_snapshot"))
        unfinished = count_unfinished.sync(connection)
        sent = count_sent.sync(connection)
        oldest = find_oldest_pending.sync(connection, limit=READ_PENDING)
    emails = {status: unfinished.get(status, 0) for status in Status}
    return Counts(emails | {Status.SENT: sent}, *oldest)


async def count_for_monitor(session: AsyncSession) -> MonitorCounts:
    """The counts for the monitor. Each statement reads a separate snapshot."""
    found = await count_monitored(session)
    return MonitorCounts(
        {status: found.get(status, 0) for status in Status if status not in _UNCOUNTED},
        *await find_oldest_pending(session, limit=READ_PENDING),
        *await count_sent_recently(session),
        await measure_webhook_lag(session),
        await list_pauses(session),
        await is_held_by_another(session, RELAY_BLOCKED),
    )


@statement
async def count_unfinished(source: Source) -> dict[str, int]: ...
@statement
async def count_monitored(source: Source) -> dict[str, int]: ...
@statement
async def count_sent(source: Source) -> int: ...
@statement
async def count_sent_recently(source: Source) -> tuple[float, float]: ...
@statement
async def find_oldest_pending(source: Source, *, limit: int) -> tuple[float | None, float | None]: ...
@statement
async def measure_webhook_lag(source: Source) -> dict[int, float]: ...
