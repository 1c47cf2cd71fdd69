"""What the monitors of all hosts share about alerts: who alerts, what was notified, how the DLQ and the flow stand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from dispatcher.domain.alert import MAX_CORRELATION_IDS, MOST_DUE, Kind
from dispatcher.domain.waiting import Facts, Trouble
from dispatcher.errors import DispatcherError
from dispatcher.store import turns
from dispatcher.store.connections import TimedSession, connect_async
from dispatcher.store.emails import find_facts
from dispatcher.store.providers import find_troubles
from dispatcher.store.retention import Retention, count_expiring
from dispatcher.store.statements import Row, fetch

ANSWER_SECONDS: Final = 4.0
"""An alert waits no longer than this for a PostgreSQL that is silent."""
LEAVE_SECONDS: Final = 1.0
"""The same at the end, which a stop waits for."""


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
class TableFindings:
    """What PostgreSQL knows of dead letters, and of the flow of emails.

    Attributes:
        correlation_ids: Of the oldest emails that failed or are held; those without one are left out.
        oldest_age_seconds: Of the oldest of these; None if there is none.
        dead_letter_due_seconds: How long a dead letter has waited for its publication; None if none waits.
        expiring: Undecided emails that are about to lose their content.
        mark: A value that changes whenever an email is accepted.
        due: Emails that are due or under lease, `MOST_DUE` at most.
        waiting: What one of them waits for; None if there is none.
        troubles: Providers that some worker cannot use now.
        hosts: When each host last reported; leaves out hosts that stopped in order.
    """

    correlation_ids: tuple[str, ...]
    oldest_age_seconds: float | None
    dead_letter_due_seconds: float | None
    expiring: int
    mark: tuple[object, ...]
    due: int
    waiting: Facts | None
    troubles: Sequence[Trouble]
    hosts: Mapping[str, datetime]


class AlertStore:
    """The monitor's statements about one DLQ, in a session of their own: the turn to alert ends with it.

    Each raises StoreUnavailable where the same call may succeed later, in another session.
    """

    def __init__(
        self,
        database_url: str,
        *,
        queue: str,
        holder: str,
        host: str,
        retention: Retention,
        idle_seconds: float,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Connects to nobody yet.

        Args:
            holder: This monitor, the same over restarts.
            host: The monitor's host.
            idle_seconds: PostgreSQL ends the session when it says nothing for so long: its host is frozen.
            answer_seconds: How long to wait for PostgreSQL.
        """
        self._database_url = database_url
        self._queue = queue
        self._holder = holder
        self._host = host
        self._retention = retention
        self._idle_seconds = idle_seconds
        self._answer_seconds = answer_seconds
        self._session: TimedSession | None = None
        self._has_turn = False
        self._opening = asyncio.Lock()

    async def take_watch(self) -> bool:
        """Whether it is this monitor's turn to alert, until its session ends. Records that this host runs."""
        session = await self._open()
        await self._fetch("report_presence", {"holder": self._holder, "host": self._host})
        if not self._has_turn:
            self._has_turn = await turns.take(session, f"alerts {self._queue}", idle_seconds=self._idle_seconds)
        return self._has_turn

    async def leave(self) -> None:
        """Leaves the turn to other monitors at once, and records that this host stops in order."""
        with suppress(DispatcherError):
            session = await self._open()
            session.answer_seconds = min(LEAVE_SECONDS, self._answer_seconds)
            await self._fetch("leave_presence", {"holder": self._holder})
        await self.close()

    async def close(self) -> None:
        """Ends the session. Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def list_told(self) -> list[Told]:
        """The alerts that stand, by channel."""
        known = set(Kind)
        rows = await self._fetch("list_alerts_told")
        # A newer release may know more kinds.
        return [Told(Kind(row[0]), *row[1:]) for row in rows if row[0] in known]

    async def enter_told(self, told: Told) -> None:
        """A channel has told that an alert stands. Idempotent."""
        told_so = {"kind": told.kind.value, "channel": told.channel, "raised_at": told.raised_at}
        await self._fetch("enter_alert_told", {**told_so, "age_seconds": told.age_seconds})

    async def enter_over(self, kind: Kind, channel: str) -> None:
        """A channel has told an alert's end. Idempotent."""
        await self._fetch("enter_alert_over", {"kind": kind.value, "channel": channel})

    async def find(self) -> TableFindings:
        """How dead letters and the flow of emails stand."""
        session = await self._open()
        oldest = await self._fetch("find_oldest_dead_letters", {"limit": MAX_CORRELATION_IDS})
        ((due_seconds,),) = await self._fetch("find_longest_due_dead_letter")
        expiring = await count_expiring(session, self._retention)
        ((hour, emails, due, email_id),) = await self._fetch("find_flow", {"limit": MOST_DUE})
        return TableFindings(
            tuple(row[0] for row in oldest if row[0]),
            oldest[0][1] if oldest else None,
            due_seconds,
            expiring.emails if expiring else 0,
            (hour, emails),
            due,
            await find_facts(session, email_id) if email_id else None,
            await find_troubles(session),
            {host: seen_at for host, seen_at, _ in await self._fetch("list_presences")},
        )

    async def _open(self) -> TimedSession:
        async with self._opening:
            if self._session is None or self._session.closed:
                self._has_turn = False
                opened = await connect_async(self._database_url, name="dispatcher alerts")
                assert isinstance(opened, TimedSession)
                opened.answer_seconds = self._answer_seconds
                self._session = opened
            return self._session

    async def _fetch(self, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        return await fetch(await self._open(), name, {"queue": self._queue, **(parameters or {})})
