"""How many emails stand where, for people and programs that ask."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.domain.status import Status
from dispatcher.store.connections import translated
from dispatcher.store.queries import query


@dataclass(frozen=True, slots=True)
class Counts:
    """The books at one instant.

    Attributes:
        emails: Emails by status, every status named.
        oldest_pending_seconds: Age of the oldest pending email; None if none is pending.
        longest_due_seconds: How long a message has been waiting to be published; None if none is due.
    """

    emails: dict[Status, int]
    oldest_pending_seconds: float | None
    longest_due_seconds: float | None


def count_emails(connection: Connection[TupleRow]) -> Counts:
    """The books, without a scan. Faults are ours (see `store.connections.translated`)."""
    with translated(), connection.transaction():
        connection.execute(query("begin_snapshot"))
        unfinished: dict[str, int] = dict(connection.execute(query("count_unfinished")).fetchall())
        sent = connection.execute(query("count_sent")).fetchone()
        oldest = connection.execute(query("find_oldest_pending")).fetchone()
    emails = {status: unfinished.get(status.value, 0) for status in Status}
    emails[Status.SENT] = sent[0] if sent else 0
    pending_seconds, due_seconds = oldest or (None, None)
    return Counts(emails, pending_seconds, due_seconds)
