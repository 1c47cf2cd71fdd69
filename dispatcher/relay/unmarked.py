"""The emails whose messages are confirmed, until a lease or a mark has taken off the due mark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import chain, islice, takewhile
from uuid import UUID

from dispatcher.store.outbox import DuePointer

_Since = tuple[datetime, float]
"""Since when it is due, by PostgreSQL's clock; and when it was confirmed, or found locked, by ours."""


class Unmarked:
    """What is remembered of them; an email is known as long as it is due since the instant that we know."""

    def __init__(self) -> None:
        # Both in the order of our instants; apart, because what is locked is not tried again merely as there is much.
        self._waiting: dict[UUID, _Since] = {}
        self._locked: dict[UUID, _Since] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._locked)

    def knows(self, row: DuePointer) -> bool:
        """Whether the message of this row is the one that was confirmed."""
        since = self._waiting.get(row.email_id) or self._locked.get(row.email_id)
        return since is not None and since[0] == row.due_at

    def confirmed(self, email_id: UUID, due_at: datetime, now: float) -> None:
        """The message of this email, which was due since then, is with RabbitMQ."""
        self._forget(email_id)
        self._waiting[email_id] = due_at, now

    def forget_all_but(self, rows: Iterable[DuePointer], until: datetime | None) -> None:
        """Forgets what is not due any more, or since another instant.

        Args:
            rows: All that is due since before `until`; all that is due at all, if that is None.
        """
        if not self:
            return
        due = {row.email_id: row.due_at for row in rows}
        for remembered in (self._waiting, self._locked):
            for email_id, (due_at, _) in list(remembered.items()):
                if due.get(email_id) != due_at and (until is None or due_at < until):
                    del remembered[email_id]

    def to_mark(self, before: float, most_waiting: int, limit: int) -> dict[UUID, datetime]:
        """Up to `limit` emails that nobody else seems to mark, and since when each is due.

        Args:
            before: Those that were confirmed, or found locked, by then.
            most_waiting: Where more are not known to be locked, the oldest of them as well.
        """
        surplus = max(0, len(self._waiting) - most_waiting)
        old = chain(
            islice(self._waiting.items(), surplus),
            takewhile(lambda item: item[1][1] <= before, self._locked.items()),
            takewhile(lambda item: item[1][1] <= before, islice(self._waiting.items(), surplus, None)),
        )
        return {email_id: due_at for email_id, (due_at, _) in islice(old, limit)}

    def all_due(self) -> dict[UUID, datetime]:
        """Every email, and since when it is due."""
        return {email_id: due_at for email_id, (due_at, _) in chain(self._waiting.items(), self._locked.items())}

    def tried(self, due: Mapping[UUID, datetime], locked: set[UUID], now: float) -> None:
        """These are marked but for what is locked. What was confirmed meanwhile for another instant stays."""
        for email_id, due_at in due.items():
            since = self._waiting.get(email_id) or self._locked.get(email_id)
            if since is not None and since[0] == due_at:
                self._forget(email_id)
                if email_id in locked:
                    self._locked[email_id] = due_at, now

    def _forget(self, email_id: UUID) -> None:
        if self._waiting.pop(email_id, None) is None and self._locked:
            self._locked.pop(email_id, None)
