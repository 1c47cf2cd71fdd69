"""What is due: messages to publish, dead letters to publish, leases to rescue."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.values import value
from dispatcher.errors import StatementRefused
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.locked import RETRY_REFUSED_SECONDS, Around, LockedRows, within
from dispatcher.store.migrations import WEEKS_AHEAD
from dispatcher.store.queries import ids_with, ids_within
from dispatcher.store.settlement import FoundLease, as_found, find_expiring
from dispatcher.store.statements import Row, fetch, made
from dispatcher.store.timeline import Promotion, follow_timeline

AHEAD_SECONDS: Final = 300.0
"""If a row's time is further ahead of PostgreSQL's clock than this, the clock was set back since."""

THE_START: Final = datetime.min.replace(tzinfo=UTC)
"""Nothing is due since before."""


@value
class DuePointer:
    """An email whose message must go to the send queue."""

    email_id: UUID
    message_key: str
    correlation_id: str | None
    traceparent: str | None
    due_at: datetime


@dataclass(frozen=True, slots=True)
class DueDeadLetter(DeadLetter):
    """A dead letter that must go to the DLQ."""

    traceparent: str | None


@dataclass(frozen=True, slots=True)
class Rescued:
    """An email that was returned after its owner was gone."""

    email_id: UUID
    correlation_id: str | None
    status: Status
    attempt_count: int


class Outbox:
    """The relay's statements, on its one session.

    Every method raises StoreUnavailable where the session is gone; all of them are harmless to call again.

    Attributes:
        locked: The emails that somebody else's transaction holds. Their marks stay.
    """

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self.locked = LockedRows(session, retry_seconds=RETRY_REFUSED_SECONDS)

    async def listen(self) -> None:
        """From now on, commits of enqueues wake `wait`."""
        await self._fetch("listen_due")

    async def wait(self, seconds: float) -> bool:
        """Waits for a commit that made something due, at most so long; returns whether there was one."""
        with translated():
            woken = False
            async for _ in self._session.notifies(timeout=seconds, stop_after=1):
                woken = True
            return woken

    async def find_publish_due(self, limit: int, *, since: datetime = THE_START) -> list[DuePointer]:
        """Up to `limit` messages to publish, longest due first; of those alone that are due since then or later."""
        parameters = {"limit": limit, "since": since, "ahead_seconds": AHEAD_SECONDS}
        try:
            return made(DuePointer, await self._fetch("find_publish_due", parameters))
        except StatementRefused:
            ids = await self._fetch("find_publish_due_ids", parameters)
        around = await self._fetch_readable("find_due_pointers", ids)
        return sorted(made(DuePointer, around.rows()), key=attrgetter("due_at"))

    async def mark_published(self, due: Mapping[UUID, datetime]) -> set[UUID]:
        """Removes the due marks of these emails, whose messages RabbitMQ has confirmed.

        Args:
            due: For each email, since when it was due.

        Returns:
            The emails that are due as before: another transaction holds a lock on their rows, or PostgreSQL refuses.
        """
        around = await self.locked.around(
            due, lambda free: self._fetch("mark_published", ids_with("due_ats", within(due, free)))
        )
        return {row[0] for row in around.rows()} | around.left

    async def find_dead_letter_due(self, limit: int) -> list[DueDeadLetter]:
        """Up to `limit` dead letters to publish, longest due first."""
        parameters = {"limit": limit, "ahead_seconds": AHEAD_SECONDS}
        try:
            rows = await self._fetch("find_dead_letter_due", parameters)
        except StatementRefused:
            ids = await self._fetch("find_dead_letter_due_ids", parameters)
            around = await self._fetch_readable("find_due_letters", ids)
            rows = around.rows()
            for email_id in around.refused:
                # A letter without the words that cannot be read. If that fails, too, it waits.
                with suppress(StatementRefused):
                    rows += await self._fetch("find_bare_letter", {"email_id": email_id})
        return made(DueDeadLetter, rows)

    async def mark_dead_lettered(self, due: Mapping[UUID, datetime]) -> None:
        """As `mark_published`, for the dead letters of these emails."""
        await self.locked.around(
            due, lambda free: self._fetch("mark_dead_lettered", ids_with("due_ats", within(due, free)))
        )

    async def _mark(self, name: str, due: Mapping[UUID, datetime]) -> Around[list[Row]]:
        return await self.locked.around(due, lambda free: self._fetch(name, ids_with("due_ats", within(due, free))))

    async def find_expiring(
        self, workers_here: Collection[str] = (), *, within_seconds: float = 0.0
    ) -> list[FoundLease]:
        """Leases that have run out, or do so within some seconds.

        Args:
            workers_here: Whose leases are left to the settlement of this host.
        """
        return await find_expiring(self._session, workers_here, are_theirs=False, within_seconds=within_seconds)

    async def rescue_expired(
        self,
        on_uncertain: OnUncertain,
        max_attempts: int,
        leases: Sequence[FoundLease],
        *,
        grace_seconds: float = 0.0,
    ) -> list[Rescued]:
        """Moves the emails of leases that expired, by their policy or else the one given.

        Args:
            leases: As they were found; one that was renewed or closed since then is left alone.
            grace_seconds: So long after the lease's end, the owner's host has had its chance.
        """
        parameters = {"on_uncertain": on_uncertain, "max_attempts": max_attempts, "grace_seconds": grace_seconds}
        by_id = {lease.email_id: lease for lease in leases}
        around = await self.locked.around(
            by_id, lambda free: self._fetch("rescue_expired", parameters | as_found([by_id[i] for i in free]))
        )
        return made(Rescued, around.rows())

    async def has_vanished(self, age_seconds: float) -> bool:
        """Whether emails are still pending so long after their message was published."""
        return bool(await self._fetch("find_vanished", {"age_seconds": age_seconds, "ahead_seconds": AHEAD_SECONDS}))

    async def republish_vanished(
        self,
        age_seconds: float,
        limit: int,
        on_uncertain: OnUncertain,
        max_attempts: int,
        *,
        doubt_seconds: float = 0.0,
    ) -> tuple[int, list[Rescued]]:
        """Makes up to `limit` of these due again, or holds them where a promotion has made them uncertain, by policy.

        Args:
            doubt_seconds: So long after a promotion was found, the uncertain ones are judged.

        Returns:
            How many were made due, and those among all that were uncertain.
        """
        found = {
            "age_seconds": age_seconds,
            "ahead_seconds": AHEAD_SECONDS,
            "limit": limit,
            "doubt_seconds": doubt_seconds,
        }
        ids = [row[0] for row in await self._fetch("find_vanished_ids", found)]
        parameters = {"on_uncertain": on_uncertain, "max_attempts": max_attempts}
        around = await self.locked.around(
            ids, lambda free: self._fetch("republish_vanished", parameters | ids_within(free))
        )
        rows = around.rows()
        return sum(row[2] == Status.PENDING for row in rows), made(Rescued, [row[:4] for row in rows if row[4]])

    async def follow_timeline(self) -> Promotion | None:
        """Notes which timeline PostgreSQL is on; returns the promotion that was found, once it is dealt with."""
        return await follow_timeline(self._session)

    async def republish_overtaken(self, age_seconds: float, limit: int) -> int:
        """Makes up to `limit` emails due again that others published so much later overtook; returns how many."""
        try:
            return len(await self._fetch("republish_overtaken", {"age_seconds": age_seconds, "limit": limit}))
        except StatementRefused:
            return 0  # once the queue is empty, `republish_vanished` finds them one by one

    async def make_partitions(self) -> list[str]:
        """Makes the partitions of the next weeks; returns the names of those that were missing."""
        return [row[0] for row in await self._fetch("make_partitions", {"weeks_ahead": WEEKS_AHEAD})]

    async def _fetch_readable(self, name: str, ids: Sequence[Row]) -> Around[list[Row]]:
        """The answer of a statement that names its emails, except those that PostgreSQL cannot read."""
        return await self.locked.around((row[0] for row in ids), lambda free: self._fetch(name, ids_within(free)))

    async def _fetch(self, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        return await fetch(self._session, name, parameters)
