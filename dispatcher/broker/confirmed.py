"""Emails whose message RabbitMQ has confirmed, kept until their due mark is cleared.

A worker that leases an email clears the email's due mark, usually within milliseconds. So the publisher (the leading
relay, or an API process) waits, and then clears only the marks of emails that no worker has leased in the meantime.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from itertools import islice, takewhile
from uuid import UUID

_Since = tuple[datetime, float]
"""Two times. By PostgreSQL's clock: when the email became due. By the local clock: when RabbitMQ confirmed the email's
message, or when the email's row was found locked."""


class ConfirmedMessages:
    """The emails whose messages RabbitMQ has confirmed to one publisher, each with the due time that it had then."""

    def __init__(self) -> None:
        self._since: dict[UUID, _Since] = {}  # in the order of the local times, oldest first

    def __len__(self) -> int:
        return len(self._since)

    def contains(self, email_id: UUID, due_at: datetime) -> bool:
        """Whether RabbitMQ has confirmed a message about this email since the email became due at `due_at`."""
        since = self._since.get(email_id)
        return since is not None and since[0] == due_at

    def add(self, due: Mapping[UUID, datetime], now: float) -> None:
        for email_id, due_at in due.items():
            self._since.pop(email_id, None)
            self._since[email_id] = due_at, now

    def retain(
        self, due: Mapping[UUID, datetime], *, since: datetime | None = None, until: datetime | None = None
    ) -> None:
        """Drops the emails that became due from `since` on and before `until`, unless `due` has the same due time."""
        for email_id, (due_at, _) in list(self._since.items()):
            is_read = (since is None or due_at >= since) and (until is None or due_at < until)
            if is_read and due.get(email_id) != due_at:
                del self._since[email_id]

    def to_mark(self, before: float, limit: int) -> dict[UUID, datetime]:
        """Up to `limit` emails whose due mark the caller must clear: confirmed, or found locked, before this time."""
        old = takewhile(lambda item: item[1][1] <= before, self._since.items())
        return {email_id: due_at for email_id, (due_at, _) in islice(old, limit)}

    def discard(self, due: Mapping[UUID, datetime], now: float, *, locked: Collection[UUID] = ()) -> None:
        """Drops emails after the caller has cleared their due marks. Keeps emails that are `locked` or due again."""
        for email_id, due_at in due.items():
            if self.contains(email_id, due_at):
                del self._since[email_id]
                if email_id in locked:
                    self._since[email_id] = due_at, now
