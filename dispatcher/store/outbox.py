"""What the relay reads and writes in PostgreSQL.

The relay publishes due emails and dead letters. It recovers the emails of expired leases, and of lost messages.

A due mark is the time from which a row's message or dead letter must be published. A row without a due mark is not
published.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeAlias
from uuid import UUID

from dispatcher.domain.controls import Controls
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.values import dataclass, value
from dispatcher.errors import StatementRefused
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.controls import LatestControls
from dispatcher.store.events import SettledEmail, find_proven, settle_proven
from dispatcher.store.instants import AHEAD_SECONDS
from dispatcher.store.locked import RETRY_REFUSED_SECONDS, BatchOutcome, LockedRows, subset
from dispatcher.store.migrations import WEEKS_AHEAD
from dispatcher.store.queries import ids_with, ids_within
from dispatcher.store.settlement import FoundLease, as_found, find_expiring
from dispatcher.store.statements import Row, fetch, from_rows
from dispatcher.store.timeline import Promotion, Timeline

Tenant: TypeAlias = "tuple[str, str]"
"""A tenant within a lane: the lane and the tenant's id."""


@value
class DuePointer:
    """An email whose message must be published to the send queue of its lane."""

    email_id: UUID
    message_key: str
    correlation_id: str | None
    traceparent: str | None
    due_at: datetime
    lane: str
    tenant_id: str

    @property
    def tenant(self) -> Tenant:
        return self.lane, self.tenant_id


@dataclass(frozen=True, slots=True)
class DueRange:
    """Which due emails of a tenant to read: at most `most` emails with due marks from `since` to `until`."""

    tenant: Tenant
    since: datetime
    until: datetime
    most: int


@dataclass(frozen=True, slots=True)
class DueDeadLetter(DeadLetter):
    """A dead letter that must be published to the DLQ."""

    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class RecoveredEmail:
    """An email whose lease had expired, or whose message was lost."""

    email_id: UUID
    correlation_id: str | None
    status: Status
    attempt_count: int


@dataclass(frozen=True, slots=True)
class ExpiredEmail:
    email_id: UUID
    correlation_id: str | None
    previous_status: Status


class Outbox:
    """What the relay reads and writes in PostgreSQL, on one session. Every method is idempotent, and raises
    StoreUnavailable if the session is lost."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self.locked = LockedRows(session, retry_seconds=RETRY_REFUSED_SECONDS)
        self.commit_seconds = 0.0  # how long the last durable commit of this session took; 0 if there was none yet
        self._controls = LatestControls(session)
        self._timeline = Timeline(session)

    async def listen(self) -> None:
        """From now on, `wait` returns when a commit notifies the relay."""
        await self._fetch("listen_due")

    async def set_polling(self, *, is_on: bool) -> None:
        """Sets whether the relay polls. If so, commits that make emails due do not notify it."""
        await self._fetch("begin_polling" if is_on else "end_polling")

    async def is_notifying_delayed(self) -> bool:
        """Whether a commit that notifies waits for another one now, in any database of the server."""
        return (await self._fetch("find_waiting_notifier")) != []

    async def read_controls(self) -> Controls:
        return await self._controls.read()

    async def wait(self, seconds: float) -> int:
        """Waits up to `seconds` for notifications that commits made emails due. Returns how many have arrived."""
        if seconds:
            # Rows may be written meanwhile, as in the two methods below.
            self._timeline.state = self._controls.found = None
        with translated():
            return len([each async for each in self._session.notifies(timeout=seconds, stop_after=1)])

    async def find_publish_due(self, limit: int, since_seconds: float | None = None) -> list[DuePointer]:
        """Up to `limit` emails whose message must be published, longest due first. Leaves out emails that have been due
        for longer than `since_seconds`, unless this is None."""
        self._timeline.state = self._controls.found = None
        return await self._find_due("find_publish_due", {"limit": limit, "since_seconds": since_seconds})

    async def find_due_tenants(self, without_lanes: Sequence[str] = ()) -> list[Tenant]:
        """The pairs of a lane and a tenant that have emails with due marks, even if the due marks are in the future."""
        self._timeline.state = self._controls.found = None
        rows = await self._fetch("find_due_tenants", {"without_lanes": list(without_lanes)})
        return [(row[0], row[1]) for row in rows]

    async def find_due_of_tenants(self, ranges: Sequence[DueRange]) -> list[DuePointer]:
        """The due emails in each range, longest due first within a tenant."""
        parameters = {
            "lanes": [each.tenant[0] for each in ranges],
            "tenant_ids": [each.tenant[1] for each in ranges],
            "sinces": [each.since for each in ranges],
            "until_ats": [each.until for each in ranges],
            "mosts": [each.most for each in ranges],
        }
        return await self._find_due("find_due_of_tenants", parameters)

    async def _find_due(self, name: str, where: dict[str, Any]) -> list[DuePointer]:
        parameters = {**where, "ahead_seconds": AHEAD_SECONDS, "only_ids": False}
        try:
            return from_rows(DuePointer, await self._fetch(name, parameters))
        except StatementRefused:  # PostgreSQL cannot read one of the rows
            ids = await self._fetch(name, parameters | {"only_ids": True})
            outcome = await self._fetch_readable("find_due_pointers", ids, only_ids=False)
            return sorted(from_rows(DuePointer, outcome.rows()), key=attrgetter("due_at"))

    async def mark_published(self, due: Mapping[UUID, datetime]) -> set[UUID]:
        """Clears the due marks of emails whose messages RabbitMQ has confirmed. `due`: the due times that the caller
        has read.

        Returns the ids of the emails that are still due, because their rows are locked or PostgreSQL refuses the
        statement for them.
        """
        outcome = await self.locked.execute_unlocked(
            due, lambda free: self._fetch("mark_published", ids_with("due_ats", subset(due, free)))
        )
        return {row[0] for row in outcome.rows()} | outcome.skipped

    async def find_dead_letter_due(self, limit: int) -> list[DueDeadLetter]:
        """Up to `limit` dead letters to publish, longest due first."""
        ids = await self._fetch("find_dead_letter_due", {"limit": limit, "ahead_seconds": AHEAD_SECONDS})
        if not ids:
            return []
        try:
            rows = await self._fetch(
                "find_due_dead_letters", {**ids_within(row[0] for row in ids), "is_minimal": False}
            )
        except StatementRefused:
            outcome = await self._fetch_readable("find_due_dead_letters", ids, is_minimal=False)
            rows = outcome.rows()
            for email_id in outcome.refused:
                # Publish the dead letter without the columns that may be damaged. If PostgreSQL cannot read the
                # remaining columns, either, the dead letter stays due.
                with suppress(StatementRefused):
                    rows += await self._fetch("find_due_dead_letters", {**ids_within([email_id]), "is_minimal": True})
        return from_rows(DueDeadLetter, rows)

    async def mark_dead_lettered(self, due: Mapping[UUID, datetime]) -> None:
        """Clears the due marks of dead letters that RabbitMQ has confirmed. See `mark_published` for `due`."""
        await self.locked.execute_unlocked(
            due, lambda free: self._fetch("mark_dead_lettered", ids_with("due_ats", subset(due, free)))
        )

    async def find_expiring(
        self, workers_here: Collection[str] = (), *, within_seconds: float = 0.0
    ) -> list[FoundLease]:
        """Leases that have expired by PostgreSQL's clock, or expire within `within_seconds`. Leaves out the leases of
        `workers_here`: the relay of this host settles them by the ledgers."""
        return await find_expiring(self._session, workers_here, are_theirs=False, within_seconds=within_seconds)

    async def recover_expired(
        self,
        on_uncertain: OnUncertain,
        max_attempts: int,
        leases: Sequence[FoundLease],
        *,
        grace_seconds: float = 0.0,
    ) -> list[RecoveredEmail]:
        """Recovers the emails of expired leases: holds them or makes them due, by their own policy or `on_uncertain`.

        A lease that has been renewed or has ended since `find_expiring` returned it is not changed. Leases that expired
        less than `grace_seconds` ago are left out, so that the relay on the worker's host can settle them first.
        """
        parameters = {"on_uncertain": on_uncertain, "max_attempts": max_attempts, "grace_seconds": grace_seconds}
        by_id = {lease.email_id: lease for lease in leases}
        outcome = await self.locked.execute_unlocked(
            by_id, lambda free: self._fetch("recover_expired", parameters | as_found([by_id[i] for i in free]))
        )
        return from_rows(RecoveredEmail, outcome.rows())

    async def find_lost_messages(self, age_seconds: float) -> list[str]:
        """The lanes that have an email which is still pending `age_seconds` after its message was published."""
        parameters = {"age_seconds": age_seconds, "ahead_seconds": AHEAD_SECONDS}
        return [row[0] for row in await self._fetch("find_lost_messages", parameters)]

    async def republish_lost(
        self,
        lanes: Sequence[str],
        age_seconds: float,
        limit: int,
        on_uncertain: OnUncertain,
        max_attempts: int,
        *,
        doubt_seconds: float = 0.0,
    ) -> tuple[int, list[RecoveredEmail]]:
        """Makes up to `limit` emails due again if their messages are lost. Returns the number of emails that became
        due, and the emails that were uncertain.

        Call this while the send queue is empty, because this proves that the messages are lost. If the promotion of a
        standby made an email uncertain, the email becomes due or held, by policy, but only `doubt_seconds` after the
        promotion was detected, so that workers can record results first.
        """
        found = {
            "lanes": list(lanes),
            "age_seconds": age_seconds,
            "ahead_seconds": AHEAD_SECONDS,
            "limit": limit,
            "doubt_seconds": doubt_seconds,
        }
        ids = [row[0] for row in await self._fetch("find_lost_message_ids", found)]
        parameters = {"on_uncertain": on_uncertain, "max_attempts": max_attempts}
        outcome = await self.locked.execute_unlocked(
            ids, lambda free: self._fetch("republish_lost", parameters | ids_within(free))
        )
        rows = outcome.rows()
        return sum(row[2] == Status.PENDING for row in rows), from_rows(
            RecoveredEmail, [row[:4] for row in rows if row[4]]
        )

    async def settle_proven(self, limit: int) -> list[SettledEmail]:
        """Settles up to `limit` emails whose acceptance an event has proven and that no worker has leased."""
        outcome = await self.locked.execute_unlocked(
            await find_proven(self._session, limit), lambda free: settle_proven(self._session, free)
        )
        return outcome.rows()

    async def find_next_due(self) -> float:
        """The seconds until a row is due: to publish, to wake, to cancel or to settle an email, or to publish a dead
        letter. 0 or less if a row is due now, infinite if no row will become due."""
        rows = await self._fetch("find_next_due", {"ahead_seconds": AHEAD_SECONDS})
        ((seconds, self._timeline.state, self._controls.found),) = rows
        return math.inf if seconds is None else float(seconds)

    async def find_next_wake(self) -> float | None:
        """The seconds until the first waiting email is due; negative if it is overdue, None if no email waits."""
        ((seconds,),) = await self._fetch("find_next_wake")
        return None if seconds is None else float(seconds)

    async def wake(self, limit: int) -> int:
        """Makes waiting emails whose time has come pending and due, at most `limit`. Returns their number."""
        ids = [row[0] for row in await self._fetch("find_wakeable", {"limit": limit})]
        outcome = await self.locked.execute_unlocked(ids, lambda free: self._fetch("wake", ids_within(free)))
        return len(outcome.rows())

    async def list_awaited_domains(self) -> list[str]:
        """The recipient domains for whose ceilings emails wait."""
        return [row[0] for row in await self._fetch("list_awaited_domains")]

    async def shorten_waits(self, domain: str, factor: float, after: datetime, limit: int) -> tuple[int, datetime]:
        """Multiplies by `factor` the waits of up to `limit` emails that wait for a domain's ceiling: 0 makes them due
        immediately. Skips locked rows. Leaves out emails that are due at `after` or earlier.

        Returns the number of emails that were read, and `after` for the next call.
        """
        rows = await self._fetch("find_domain_waits", {"domain": domain, "after": after, "limit": limit})
        waits = {email_id: seconds * factor for email_id, _, seconds in rows}
        await self.locked.execute_unlocked(
            waits, lambda free: self._fetch("shorten_waits", ids_with("seconds", {each: waits[each] for each in free}))
        )
        return len(rows), rows[-1][1] if rows else after

    async def shorten_group_waits(self, domain: str, factor: float) -> None:
        """Lets later emails of a domain wait less, after `shorten_waits`: a new email becomes due after the last
        waiting email of the same domain, lane and tenant. Multiplies by `factor` the time until that last email is
        due."""
        await self._fetch("shorten_group_waits", {"domain": domain, "factor": factor})

    async def cancel_expired(self, limit: int) -> list[ExpiredEmail]:
        """Cancels up to `limit` emails that have expired and that no worker has leased."""
        ids = [row[0] for row in await self._fetch("find_expired", {"limit": limit})]
        outcome = await self.locked.execute_unlocked(ids, lambda free: self._fetch("cancel_expired", ids_within(free)))
        return from_rows(ExpiredEmail, outcome.rows())

    async def follow_timeline(self) -> Promotion | None:
        """Returns the promotion of a standby since the last call; None if there was none. Also marks the leases and
        messages that the promotion made uncertain (see `Timeline`)."""
        promotion = await self._timeline.follow()
        self.commit_seconds = self._timeline.commit_seconds
        return promotion

    async def republish_overtaken(self, lanes: Sequence[str], age_seconds: float, limit: int) -> int:
        """Makes up to `limit` overtaken emails due again. Returns their number.

        An email is overtaken if its message was published more than `age_seconds` before the message of another email
        on the same queue that is already being sent. The message of an overtaken email is probably lost.
        """
        parameters = {"lanes": list(lanes), "age_seconds": age_seconds, "limit": limit}
        try:
            return len(await self._fetch("republish_overtaken", parameters))
        except StatementRefused:
            # PostgreSQL cannot read one of the emails, so the statement changes none of them. When the send queue is
            # empty, `republish_lost` makes the other emails due again.
            return 0

    async def make_partitions(self) -> list[str]:
        """Creates the missing partitions of the next weeks. Returns their names."""
        return [row[0] for row in await self._fetch("make_partitions", {"weeks_ahead": WEEKS_AHEAD})]

    async def _fetch_readable(self, name: str, ids: Sequence[Row], **others: Any) -> BatchOutcome[list[Row]]:
        """Executes a statement that reads the given emails, except those that PostgreSQL cannot read."""
        return await self.locked.execute_unlocked(
            (row[0] for row in ids), lambda free: self._fetch(name, ids_within(free) | others)
        )

    async def _fetch(self, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        return await fetch(self._session, name, parameters)
