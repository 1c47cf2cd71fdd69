"""What is due: messages to publish, dead letters to publish, leases to rescue."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.values import value
from dispatcher.errors import StatementRefused
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.locked import RETRY_REFUSED_SECONDS, LockedRows
from dispatcher.store.migrations import WEEKS_AHEAD
from dispatcher.store.queries import ids_within, query
from dispatcher.store.settlement import FoundLease, as_found, find_expiring
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
class DueDeadLetter:
    """An email whose dead letter must go to the DLQ; nothing private."""

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    traceparent: str | None
    status: Status
    error_type: str | None
    error: str | None
    attempt_count: int
    provider: str | None
    created_at: datetime
    failed_at: datetime


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
        self.locked = LockedRows(lambda: nullcontext(session), retry_seconds=RETRY_REFUSED_SECONDS)

    async def listen(self) -> None:
        """From now on, commits of enqueues wake `wait`."""
        with translated():
            await self._session.execute(query("listen_due"))

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
            rows = await self._fetch("find_publish_due", parameters)
        except StatementRefused:
            ids = [row[0] for row in await self._fetch("find_publish_due_ids", parameters)]
            rows, _ = await self._fetch_around("find_due_pointers", ids)
            rows.sort(key=itemgetter(4))
        return [DuePointer(*row) for row in rows]

    async def mark_published(self, due: Mapping[UUID, datetime]) -> set[UUID]:
        """The broker confirmed the messages of these emails, which were due since then; returns what somebody has
        locked, and what is due as before."""
        try:
            return {row[0] for row in await self._fetch("mark_published", due_since(due))}
        except StatementRefused:
            around = await self.locked.around(
                due, lambda free: self._fetch("mark_published", due_since({i: due[i] for i in free}))
            )
        return {row[0] for rows in around.answers for row in rows} | around.locked | around.refused.keys()

    async def find_dead_letter_due(self, limit: int) -> list[DueDeadLetter]:
        """Up to `limit` dead letters to publish, longest due first."""
        parameters = {"limit": limit, "ahead_seconds": AHEAD_SECONDS}
        try:
            rows = await self._fetch("find_dead_letter_due", parameters)
        except StatementRefused:
            ids = [row[0] for row in await self._fetch("find_dead_letter_due_ids", parameters)]
            rows, refused = await self._fetch_around("find_due_letters", ids)
            for email_id in refused:
                # A letter without the words that cannot be read; if that fails, too, it waits.
                with suppress(StatementRefused):
                    rows += await self._fetch("find_bare_letter", {"email_id": email_id})
        return [_dead_letter(row) for row in rows]

    async def mark_dead_lettered(self, due: Mapping[UUID, datetime]) -> None:
        """The broker confirmed the dead letters of these emails, which were due since then."""

        async def execute(free: set[UUID]) -> None:
            with translated():
                await self._session.execute(query("mark_dead_lettered"), due_since({i: due[i] for i in free}))

        await self.locked.around(due, execute)

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
        if not leases:
            return []
        parameters = {
            "on_uncertain": on_uncertain.value,
            "max_attempts": max_attempts,
            "grace_seconds": grace_seconds,
        }
        try:
            rows = await self._fetch("rescue_expired", {**parameters, **as_found(leases)})
        except StatementRefused:
            rows = await self._rescue_apart(parameters, {lease.email_id: lease for lease in leases})
        return [_rescued(row) for row in rows]

    async def _rescue_apart(
        self, parameters: dict[str, Any], leases: Mapping[UUID, FoundLease]
    ) -> list[tuple[Any, ...]]:
        around = await self.locked.around(
            leases, lambda free: self._fetch("rescue_expired", {**parameters, **as_found([leases[i] for i in free])})
        )
        return [*chain.from_iterable(around.answers)]

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
        if not ids:
            return 0, []
        parameters = {"on_uncertain": on_uncertain.value, "max_attempts": max_attempts}
        try:
            rows = await self._fetch("republish_vanished", {**parameters, **ids_within(ids)})
        except StatementRefused:
            rows, _ = await self._fetch_around("republish_vanished", ids, parameters)
        uncertain = [_rescued(row) for row in rows if row[4]]
        return sum(row[2] == Status.PENDING for row in rows), uncertain

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

    async def _fetch_around(
        self, name: str, ids: Collection[UUID], parameters: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[list[tuple[Any, ...]], Collection[UUID]]:
        """The answer of a statement that names its emails, but for those that PostgreSQL refuses; and these."""
        around = await self.locked.around(ids, lambda free: self._fetch(name, {**parameters, **ids_within(free)}))
        return [*chain.from_iterable(around.answers)], around.refused.keys()

    async def _fetch(self, name: str, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        with translated():
            cursor = await self._session.execute(query(name), parameters)
            return await cursor.fetchall()


def due_since(due: Mapping[UUID, datetime]) -> dict[str, Any]:
    """The parameters of `mark_published` and its like: emails, one at least, and since when each was due."""
    ids = ids_within(due)
    return {**ids, "due_ats": [due[email_id] for email_id in ids["email_ids"]]}


def _rescued(row: tuple[Any, ...]) -> Rescued:
    return Rescued(row[0], row[1], Status(row[2]), row[3])


def _dead_letter(row: tuple[Any, ...]) -> DueDeadLetter:
    values = list(row)
    values[5] = Status(values[5])
    return DueDeadLetter(*values)
