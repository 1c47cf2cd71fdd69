"""The emails whose messages are confirmed, remembered until a lease or a mark has taken off the due mark.

A worker that leases an email takes its due mark off, mostly within milliseconds. So the publisher of a message (the
leading relay, an API process) marks later, and only what no worker has leased until then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from itertools import chain, islice, takewhile
from uuid import UUID

_Since = tuple[datetime, float]
"""Since when it is due, by PostgreSQL's clock; and when it was confirmed, or found locked, by ours."""


class ConfirmedMessages:
    """An email is known as long as it is due since the instant that we know."""

    def __init__(self) -> None:
        # Both in the order of our instants; apart, because what is locked is not tried again merely as there is much.
        self._waiting: dict[UUID, _Since] = {}
        self._locked: dict[UUID, _Since] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._locked)

    def knows(self, email_id: UUID, due_at: datetime) -> bool:
        """Whether the message is confirmed that was due since then."""
        since = self._waiting.get(email_id) or self._locked.get(email_id)
        return since is not None and since[0] == due_at

    def add(self, due: Mapping[UUID, datetime], now: float) -> None:
        """The messages of these emails, which were due since then, are with RabbitMQ."""
        for email_id, due_at in due.items():
            self._forget(email_id)
            self._waiting[email_id] = due_at, now

    def forget_all_but(self, due: Mapping[UUID, datetime], until: datetime | None) -> None:
        """Forgets what is not due any more, or since another instant.

        Args:
            due: All that is due since before `until`; all that is due at all, if that is None.
        """
        for remembered in (self._waiting, self._locked):
            for email_id, (due_at, _) in list(remembered.items()):
                if due.get(email_id) != due_at and (until is None or due_at < until):
                    del remembered[email_id]

    def to_mark(self, before: float, limit: int, *, most_waiting: int | None = None) -> dict[UUID, datetime]:
        """Up to `limit` emails that nobody else seems to mark, and since when each is due.

        Args:
            before: Those that were confirmed, or found locked, by then.
            most_waiting: Where more are not known to be locked, the oldest of them as well.
        """
        surplus = 0 if most_waiting is None else max(0, len(self._waiting) - most_waiting)
        old = chain(
            islice(self._waiting.items(), surplus),
            takewhile(lambda item: item[1][1] <= before, self._locked.items()),
            takewhile(lambda item: item[1][1] <= before, islice(self._waiting.items(), surplus, None)),
        )
        return {email_id: due_at for email_id, (due_at, _) in islice(old, limit)}

    def tried(self, due: Mapping[UUID, datetime], now: float, *, locked: Collection[UUID] = ()) -> None:
        """These are marked but for what is locked. What was confirmed meanwhile for another instant stays."""
        for email_id, due_at in due.items():
            if self.knows(email_id, due_at):
                self._forget(email_id)
                if email_id in locked:
                    self._locked[email_id] = due_at, now

    def _forget(self, email_id: UUID) -> None:
        if self._waiting.pop(email_id, None) is None and self._locked:
            self._locked.pop(email_id, None)
