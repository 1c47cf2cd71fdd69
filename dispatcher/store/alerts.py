"""The alert state that the monitors of all hosts share: which monitor alerts, which notices were sent, and what the
last check found."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import orjson

from dispatcher.domain.alert import MAX_CORRELATION_IDS, MAX_DUE_COUNT, Alert, Kind
from dispatcher.domain.controls import Pause
from dispatcher.domain.values import dataclass
from dispatcher.domain.waiting import Facts, ProviderProblem
from dispatcher.domain.webhook import WebhookState
from dispatcher.errors import DispatcherError
from dispatcher.store import named_locks
from dispatcher.store.connections import TimedSession, connect_async
from dispatcher.store.controls import list_pauses
from dispatcher.store.emails import find_facts
from dispatcher.store.figures import WebhookCheck, check_webhooks, list_host_reports
from dispatcher.store.providers import find_troubles
from dispatcher.store.retention import Retention, count_expiring
from dispatcher.store.statements import Row, Source, fetch, statement

ANSWER_SECONDS: Final = 4.0
"""How long a monitor waits for PostgreSQL to answer a statement about alerts."""
LEAVE_SECONDS: Final = 1.0
"""How long a stopping monitor waits for PostgreSQL to answer."""


@dataclass(frozen=True, slots=True)
class AnnouncedAlert:
    """An active alert about which a channel has sent a notice."""

    kind: Kind
    channel: str
    raised_at: datetime
    age_seconds: float  # since the channel last sent a notice


@dataclass(frozen=True, slots=True)
class TableFindings:
    """What a check found in PostgreSQL: about dead letters, sending, providers, hosts, webhooks and pauses."""

    correlation_ids: tuple[str, ...]
    oldest_age_seconds: float | None  # age of the oldest failed or held email
    dead_letter_due_seconds: float | None  # how long the oldest unpublished dead letter has been due
    expiring: int
    mark: tuple[object, ...]  # changes whenever a provider accepts an email
    due: int  # emails that are due or in their first lease, and not paused; counted up to MAX_DUE_COUNT
    waiting: Facts | None  # the facts that explain why one of the `due` emails is not sent yet
    troubles: Sequence[ProviderProblem]
    hosts: Mapping[str, datetime]  # when each last reported, without hosts that stopped in an orderly way
    shared_names: Sequence[str]
    webhooks: Sequence[WebhookCheck]
    pauses: Sequence[Pause] = ()
    impossible_events: Sequence[Row] = ()


class AlertStore:
    """What a monitor reads and writes in PostgreSQL for its alerts.

    Uses a separate session, which also holds a named lock: of the monitors of one DLQ, only the monitor with this lock
    alerts. Each method raises StoreUnavailable if the same call might succeed later in a new session.
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
        """Opens no connection yet. `holder`: this monitor's name, which does not change when the monitor restarts.

        PostgreSQL ends the session, and so releases the lock, after `idle_seconds` without a statement. This monitor's
        host is then probably frozen, and another monitor must alert.
        """
        self._database_url = database_url
        self._queue = queue
        self._holder = holder
        self._host = host
        self._retention = retention
        self._idle_seconds = idle_seconds
        self._answer_seconds = answer_seconds
        self._session: TimedSession | None = None
        self._is_alerting = False
        self._opening = asyncio.Lock()

    async def claim_alerting(self) -> bool:
        """Records that this host is running, and takes the lock of the alerting monitor, unless another monitor has it.

        Returns whether this monitor has the lock. If so, this monitor alerts until its session ends.
        """
        session = await self._open()
        unknown = {"version": None, "processes": None, "recipients": None}  # `report_processes` knows them
        await self._fetch("report_presence", {"holder": self._holder, "host": self._host, **unknown})
        if not self._is_alerting:
            self._is_alerting = await named_locks.acquire(session, f"alerts {self._queue}")
        return self._is_alerting

    async def leave(self) -> None:
        """Records that this host stops in an orderly way, and ends the session, so that another monitor can alert."""
        with suppress(DispatcherError):
            session = await self._open()
            session.answer_seconds = min(LEAVE_SECONDS, self._answer_seconds)
            await self._fetch("leave_presence", {"holder": self._holder})
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def list_announced(self) -> list[AnnouncedAlert]:
        """The active alerts about which notices were sent: one entry for each alert and channel."""
        known = set(Kind)
        rows = await self._fetch("list_announced_alerts")
        # Leave out kinds of alerts that this release does not have: a newer release may have stored them.
        return [AnnouncedAlert(Kind(row[0]), *row[1:]) for row in rows if row[0] in known]

    async def save_announced(self, announced: AnnouncedAlert) -> None:
        parameters = {
            "kind": announced.kind.value,
            "channel": announced.channel,
            "raised_at": announced.raised_at,
            "age_seconds": announced.age_seconds,
        }
        await self._fetch("save_announced_alert", parameters)

    async def delete_announced(self, kind: Kind, channel: str) -> None:
        """Call this after the channel has sent the notice that the alert is resolved. Idempotent."""
        await self._fetch("delete_announced_alert", {"kind": kind.value, "channel": channel})

    async def save_check(self, host: str, depth: int | None, fault: str | None, alerts: Sequence[Alert]) -> None:
        """Records what a check of the DLQ found, for the operators' page. `depth` is None if `fault` says why RabbitMQ
        did not report the number of messages."""
        shown = [
            {
                "kind": alert.kind,
                "raised_at": alert.raised_at.isoformat(),
                "count": alert.count,
                "oldest_age_seconds": alert.oldest_age_seconds,
                "reason": alert.reason,
            }
            for alert in alerts
        ]
        parameters = {"host": host, "depth": depth, "fault": fault, "alerts": orjson.dumps(shown).decode()}
        await self._fetch("save_alert_check", parameters)

    async def find(self) -> TableFindings:
        """Reads the facts by which the monitor decides which alerts to raise."""
        session = await self._open()
        oldest = await find_oldest_dead_letters(session, limit=MAX_CORRELATION_IDS)
        due_seconds = await find_longest_due_dead_letter(session)
        expiring = await count_expiring(session, **undecided) if (undecided := self._retention.expiring) else None
        hour, emails, due, email_id = await find_flow(session, limit=MAX_DUE_COUNT)
        reports = reversed(await list_host_reports(session))  # the newest report of a host is the last
        return TableFindings(
            tuple(row[0] for row in oldest if row[0]),
            oldest[0][1] if oldest else None,
            due_seconds,
            expiring.emails if expiring else 0,
            (hour, emails),
            due,
            await find_facts(session, email_id) if email_id else None,
            await find_troubles(session),
            {each.host: each.seen_at for each in reports},
            await list_shared_host_names(session),
            [each for each in await check_webhooks(session) if each.state is WebhookState.DISABLED],
            await list_pauses(session),
            await find_impossible_events(session, limit=MAX_DUE_COUNT),
        )

    async def _open(self) -> TimedSession:
        async with self._opening:
            if self._session is None or self._session.closed:
                self._is_alerting = False
                opened = await connect_async(
                    self._database_url, name=f"dispatcher alerts {self._host}", idle_seconds=self._idle_seconds
                )
                assert isinstance(opened, TimedSession)
                opened.answer_seconds = self._answer_seconds
                self._session = opened
            return self._session

    async def _fetch(self, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        return await fetch(await self._open(), name, {"queue": self._queue, **(parameters or {})})


@statement
async def find_oldest_dead_letters(source: Source, *, limit: int) -> list[tuple[str | None, float]]: ...
@statement
async def find_longest_due_dead_letter(source: Source) -> float | None: ...
@statement
async def list_shared_host_names(source: Source) -> list[str]: ...
@statement
async def find_flow(source: Source, *, limit: int) -> tuple[datetime | None, Decimal | None, int, UUID | None]: ...
@statement
async def find_impossible_events(source: Source, *, limit: int) -> list[tuple[str, int, str]]: ...
