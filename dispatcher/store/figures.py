"""What `dispatcher status`, the Overview and the monitor's gauges show: each figure has one statement. No statement
scans the sent emails. What all visitors of the Overview read every few seconds is counted up to a limit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final

from dispatcher.domain.controls import Pause
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass
from dispatcher.domain.webhook import WebhookState
from dispatcher.store.connections import AsyncSession
from dispatcher.store.controls import list_pauses
from dispatcher.store.named_locks import RELAY_BLOCKED, is_held_by_another
from dispatcher.store.queries import query
from dispatcher.store.statements import Source, fetch, statement

MISSED_REPORTS: Final = 3
"""A host counts as silent only after its monitor missed this many reports, even if DISPATCHER_ALERT_AFTER_SECONDS is
shorter; and a check of the DLQ is old after as many probe intervals."""
READ_PENDING: Final = 100_000
"""The most pending emails, and the most due emails, that are read to find the oldest email that no operator paused."""
COUNTED: Final = 10_000
"""The most emails that the Overview counts for each status, and reads to find the oldest email."""
COUNTED_UNDECIDED: Final = 50_000
"""The most dead letters, and the most held emails, that the Overview counts. The limit is higher than `COUNTED`,
because an index contains only these emails."""
READ_FOR_LATENCY: Final = 2_000
STATEMENT_MILLISECONDS: Final = 2_000


@dataclass(frozen=True, slots=True)
class MonitorCounts:
    """The figures that the monitor reads at intervals, each from a snapshot of its own.

    Attributes:
        emails: Without `sent` and `cancelled`, because there may be millions. Metrics count these emails when they get
            the status.
        oldest_pending_seconds, longest_due_seconds: See `find_oldest_pending`.
        sent_last_hour: Approximate number of emails sent in the last 60 minutes, from counts per clock hour. Example:
            at 10:15, this is the count since 10:00, and three quarters of the count from 9:00 to 10:00.
        webhook_lag_seconds: For each active webhook, by id: the age of the oldest event that was not delivered; 0 if
            every event was. Refused events that were stored for a retry do not count.
        is_blocked: Whether RabbitMQ blocks the leading relay's messages because of a memory or disk alarm.
    """

    emails: Mapping[Status, int]
    oldest_pending_seconds: float | None
    longest_due_seconds: float | None
    sent_last_hour: float
    sent_last_day: float
    webhook_lag_seconds: Mapping[int, float]
    pauses: Sequence[Pause] = ()
    is_blocked: bool = False


@dataclass(frozen=True, slots=True)
class WebhookCheck:
    """What the monitor checks of a webhook.

    Attributes:
        last_error: Of a disabled webhook, why it is disabled: an operator disabled it, or its receiver fails.
        lag_seconds: The age of the oldest event of the feed after the webhook's cursor. None if there is none.
    """

    webhook_id: int
    tenant_id: str | None
    state: WebhookState
    last_error: str | None
    lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class BoundedCount:
    """A count of emails. If the counting stopped at its limit (`is_cut`), there can be more emails."""

    emails: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of how long the newest sent emails waited, from when an email could first be sent until a provider
    accepted it: at most 1,000 emails of the last ten minutes."""

    emails: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the newest sent emails were sent: those of one host, or of one provider.

    Attributes:
        host, provider: One is None.
        p50_seconds, p99_seconds: Of how long an attempt took.
    """

    host: str | None
    provider: str | None
    emails: int
    per_minute: float
    p50_seconds: float
    p99_seconds: float


@dataclass(frozen=True, slots=True)
class Attempts:
    """The number of attempts in one hour or day with one provider and one outcome."""

    begins_at: datetime
    provider: str
    outcome: str
    emails: int


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker, on any host, that has a PostgreSQL session, leases, or both.

    Attributes:
        name: The host, the slot, the process id and a random number, separated by colons.
        age_seconds: Seconds since the worker started. None if the worker has no session; recovery then takes over
            its emails.
        leases_end_in_seconds: Seconds until the worker's last lease expires, negative if it has expired; None if the
            worker has no leases.
    """

    name: str
    age_seconds: float | None
    in_flight: int
    leases_end_in_seconds: float | None = None

    @property
    def parts(self) -> tuple[str, str, str]:
        """The host, the slot such as `w0`, and the process id; empty texts if the name has no such parts."""
        host, slot, pid, *_ = *self.name.split(":"), "", ""
        return host, slot, pid

    @property
    def host(self) -> str:
        return self.parts[0]


@dataclass(frozen=True, slots=True)
class HostReport:
    """A monitor's last report about its host. `version` and `processes` (see `samples.report_processes`) are None if it
    has not reported them."""

    host: str
    seen_at: datetime
    age_seconds: float
    version: str | None
    processes: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class ActiveAlert:
    """An alert that was active at the last check. The attributes are those of `domain.alert.Alert`."""

    kind: str
    raised_at: datetime
    count: int | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class AlertCheck:
    """The last check of the DLQ. `depth` is None if the number of messages could not be read, because of `fault`."""

    host: str
    age_seconds: float
    depth: int | None
    fault: str | None
    alerts: Sequence[Mapping[str, Any]]

    @property
    def active(self) -> list[ActiveAlert]:
        """The alerts, oldest first. The monitor that stored them may be of a later release, so an alert that cannot be
        read is left out."""
        found = []
        for alert in self.alerts:
            try:
                raised_at = datetime.fromisoformat(alert["raised_at"])
                found.append(ActiveAlert(str(alert["kind"]), raised_at, alert.get("count"), alert.get("reason")))
            except (AttributeError, KeyError, TypeError, ValueError):
                continue
        return sorted(found, key=lambda alert: alert.raised_at)


@asynccontextmanager
async def one_snapshot(session: AsyncSession) -> AsyncIterator[None]:
    """Makes all statements in the block read the same snapshot, and limits each to `STATEMENT_MILLISECONDS`."""
    async with session.transaction():
        await session.execute(query("begin_snapshot"))
        await fetch(session, "limit_overview", {"milliseconds": STATEMENT_MILLISECONDS})
        yield


async def count_for_monitor(session: AsyncSession) -> MonitorCounts:
    return MonitorCounts(
        await count_monitored(session),
        *await find_oldest_pending(session),
        *await count_sent_recently(session),
        {
            each.webhook_id: each.lag_seconds or 0.0
            for each in await check_webhooks(session)
            if each.state is WebhookState.ACTIVE
        },
        await list_pauses(session),
        await is_held_by_another(session, RELAY_BLOCKED),
    )


@statement
async def count_emails(source: Source) -> dict[Status, int]: ...
@statement
async def count_kept_back(source: Source) -> int: ...
@statement
async def count_monitored(source: Source) -> dict[Status, int]: ...
@statement
async def count_for_overview(
    source: Source, *, tenant_id: str | None, limit: int = COUNTED, undecided: int = COUNTED_UNDECIDED
) -> dict[str, BoundedCount]: ...
@statement
async def count_paused(source: Source, *, limit: int = COUNTED) -> BoundedCount: ...
@statement
async def find_oldest_pending(source: Source, *, limit: int = READ_PENDING) -> tuple[float | None, float | None]: ...
@statement
async def count_sent_recently(source: Source) -> tuple[float, float]: ...
@statement
async def measure_latency(source: Source, *, limit: int = READ_FOR_LATENCY) -> Latency | None: ...
@statement
async def measure_paces(source: Source, *, limit: int = READ_FOR_LATENCY) -> list[Pace]: ...
@statement
async def sum_attempts(source: Source, unit: str, seconds: float) -> list[Attempts]: ...
@statement
async def check_webhooks(source: Source) -> list[WebhookCheck]: ...
@statement
async def list_workers(source: Source) -> list[WorkerSeen]: ...
@statement
async def list_host_reports(source: Source) -> list[HostReport]: ...
@statement
async def find_alert_check(source: Source, *, queue: str) -> AlertCheck | None: ...
