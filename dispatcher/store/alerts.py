"""What monitors on all hosts share about alerts: who watches, what was told, and which dead letters are the oldest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dispatcher.domain.alert import MAX_CORRELATION_IDS, MOST_DUE, Kind
from dispatcher.domain.waiting import Facts, Trouble
from dispatcher.store.connections import Pool, session
from dispatcher.store.emails import find_facts, find_troubles
from dispatcher.store.retention import Expiring, Retention, count_expiring
from dispatcher.store.statements import Row, fetch


@dataclass(frozen=True, slots=True)
class Told:
    """An alert that a channel has told, and whose end it has not told yet.

    Attributes:
        age_seconds: How long ago it was last told.
    """

    kind: Kind
    channel: str
    raised_at: datetime
    age_seconds: float


@dataclass(frozen=True, slots=True)
class OldestDeadLetters:
    """What the tables know of the emails that failed or are held.

    Attributes:
        correlation_ids: Of the oldest; those without one are left out.
        age_seconds: Of the oldest; None if there is no such email.
    """

    correlation_ids: tuple[str, ...]
    age_seconds: float | None


@dataclass(frozen=True, slots=True)
class Flow:
    """Whether emails are sent, and what may stop them.

    Attributes:
        mark: A value that changes whenever an email is accepted.
        due: Emails that are due or under lease, `MOST_DUE` at most.
        waiting: What one of them waits for; None if there is none.
        troubles: Providers that some worker cannot use now.
        hosts: When each host last reported; leaves out hosts that stopped in order.
    """

    mark: tuple[object, ...]
    due: int
    waiting: Facts | None
    troubles: Sequence[Trouble]
    hosts: Mapping[str, datetime]


class AlertStore:
    """The monitor's statements about one DLQ; each raises StoreUnavailable where the same call may succeed later."""

    def __init__(self, pool: Pool, *, queue: str, holder: str, host: str, retention: Retention) -> None:
        """
        Args:
            holder: This monitor, the same over restarts.
            host: The monitor's host.
        """
        self._host = host
        self._retention = retention
        self._pool = pool
        self._queue = queue
        self._holder = holder

    async def hold_watch(self, seconds: float) -> bool:
        """Takes or keeps the watch for so long; returns whether it is ours. Records that this host runs."""
        parameters = {"holder": self._holder, "host": self._host, "seconds": seconds}
        return bool(await self._fetch("hold_alert_watch", parameters))

    async def release_watch(self) -> None:
        """Gives the watch back, if it is ours; records that this host stops in order."""
        await self._fetch("release_alert_watch", {"holder": self._holder})

    async def list_told(self) -> list[Told]:
        """The alerts that stand, by channel."""
        known = set(Kind)
        rows = await self._fetch("list_alerts_told", {})
        # A newer release may know more kinds.
        return [Told(Kind(row[0]), *row[1:]) for row in rows if row[0] in known]

    async def enter_told(self, told: Told) -> None:
        """A channel has told that an alert stands. A second call is harmless."""
        told_so = {"kind": told.kind.value, "channel": told.channel, "raised_at": told.raised_at}
        await self._fetch("enter_alert_told", {**told_so, "age_seconds": told.age_seconds})

    async def enter_over(self, kind: Kind, channel: str) -> None:
        """A channel has told an alert's end. A second call is harmless."""
        await self._fetch("enter_alert_over", {"kind": kind.value, "channel": channel})

    async def find_oldest(self) -> OldestDeadLetters:
        """The oldest emails that failed or are held."""
        rows = await self._fetch("find_oldest_dead_letters", {"limit": MAX_CORRELATION_IDS})
        return OldestDeadLetters(tuple(row[0] for row in rows if row[0]), rows[0][1] if rows else None)

    async def count_expiring(self) -> Expiring | None:
        """Undecided emails that are about to lose their content; None where they are kept for ever."""
        async with session(self._pool) as connection:
            return await count_expiring(connection, self._retention)

    async def find_flow(self) -> Flow:
        """Whether emails are sent, and what may stop them."""
        async with session(self._pool) as connection:
            ((hour, emails, due, email_id),) = await fetch(connection, "find_flow", {"limit": MOST_DUE})
            facts = await find_facts(connection, email_id) if email_id else None
            troubles = await find_troubles(connection)
            hosts = {host: seen_at for host, seen_at, _ in await fetch(connection, "list_presences")}
            return Flow((hour, emails), due, facts, troubles, hosts)

    async def longest_due_seconds(self) -> float | None:
        """How long a dead letter has waited for its place on the DLQ; None if none waits."""
        rows = await self._fetch("find_longest_due_dead_letter", {})
        age_seconds: float | None = rows[0][0]
        return age_seconds

    async def _fetch(self, name: str, parameters: Mapping[str, Any]) -> list[Row]:
        return await fetch(self._pool, name, {"queue": self._queue, **parameters})
