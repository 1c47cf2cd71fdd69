"""Emails whose message RabbitMQ has confirmed, kept until their due mark is cleared.

A worker that leases an email clears the email's due mark, usually within milliseconds. So the publisher (the leading
relay, or an API process) waits, and then clears only the marks of emails that no worker has leased in the meantime.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from itertools import chain, islice, takewhile
from uuid import UUID

_Since = tuple[datetime, float]
"""Two times: when the email became due, by PostgreSQL's clock, and when its message was confirmed or its row was found
locked, by the local clock."""


class ConfirmedMessages:
    """The confirmed messages of one publisher. An entry is valid only while the email has the recorded due time."""

    def __init__(self) -> None:
        # Both dictionaries are ordered by local time. They are separate: otherwise, a long queue would cause retries of
        # locked rows.
        self._waiting: dict[UUID, _Since] = {}
        self._locked: dict[UUID, _Since] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._locked)

    def contains(self, email_id: UUID, due_at: datetime) -> bool:
        """Whether the message that became due at `due_at` is confirmed."""
        since = self._waiting.get(email_id)
        if since is None and self._locked:
            since = self._locked.get(email_id)
        return since is not None and since[0] == due_at

    def add(self, due: Mapping[UUID, datetime], now: float) -> None:
        """Records that RabbitMQ confirmed the messages of these emails."""
        for email_id, due_at in due.items():
            self._forget(email_id)
            self._waiting[email_id] = due_at, now

    def retain(self, due: Mapping[UUID, datetime], until: datetime | None) -> None:
        """Drops emails that are no longer due, or that have a different due time.

        Args:
            due: All emails that became due before `until`; all due emails if `until` is None.
        """
        for remembered in (self._waiting, self._locked):
            for email_id, (due_at, _) in list(remembered.items()):
                if due.get(email_id) != due_at and (until is None or due_at < until):
                    del remembered[email_id]

    def to_mark(self, before: float, limit: int) -> dict[UUID, datetime]:
        """Up to `limit` emails whose due mark the caller must clear, each with its due time.

        Args:
            before: Only emails that were confirmed, or found locked, by this time.
        """
        old = chain(
            takewhile(lambda item: item[1][1] <= before, self._locked.items()),
            takewhile(lambda item: item[1][1] <= before, self._waiting.items()),
        )
        return {email_id: due_at for email_id, (due_at, _) in islice(old, limit)}

    def discard(self, due: Mapping[UUID, datetime], now: float, *, locked: Collection[UUID] = ()) -> None:
        """Drops the emails whose due mark was cleared. Keeps emails whose row was locked, for the next try, and emails
        that were confirmed again for a different due time."""
        for email_id, due_at in due.items():
            if self.contains(email_id, due_at):
                self._forget(email_id)
                if email_id in locked:
                    self._locked[email_id] = due_at, now

    def _forget(self, email_id: UUID) -> None:
        if self._waiting.pop(email_id, None) is None and self._locked:
            self._locked.pop(email_id, None)
