"""The figures of the operators' overview page. Each figure is read from a bounded number of rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from dispatcher.store.activity import Latency
from dispatcher.store.connections import AsyncSession
from dispatcher.store.queries import query
from dispatcher.store.statements import Source, fetch, statement

COUNTED: Final = 10_000
"""The most emails that are counted for each status."""
COUNTED_UNDECIDED: Final = 50_000
"""The most dead letters, and the most held emails, that are counted. The limit is higher than `COUNTED`, because an
index contains only these emails."""
READ_FOR_LATENCY: Final = 2_000
STATEMENT_MILLISECONDS: Final = 2_000


@dataclass(frozen=True, slots=True)
class BoundedCount:
    """A count of emails that stops at a limit.

    Attributes:
        is_cut: Whether the count stopped at the limit, so there can be more emails.
    """

    emails: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ProviderRate:
    """The rate of a provider with a ceiling.

    Attributes:
        per_second: Emails per second that all hosts together may send now.
    """

    provider: str
    per_second: float
    was_throttled: bool


@dataclass(frozen=True, slots=True)
class HostReport:
    """A monitor's last report about its host.

    Attributes:
        processes: The host's processes (see `samples.report_processes`); None if the host's release does not report
            processes.
    """

    host: str
    age_seconds: float
    version: str | None
    processes: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class ActiveAlert:
    """An alert that was active at the last check. The attributes are those of `domain.alert.Alert`."""

    kind: str
    raised_at: datetime
    count: int | None
    oldest_age_seconds: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class AlertCheck:
    """The last check of the DLQ.

    Attributes:
        depth: The number of messages on the DLQ; None if the number could not be read.
    """

    host: str
    age_seconds: float
    depth: int | None
    fault: str | None
    alerts: Sequence[ActiveAlert]


@asynccontextmanager
async def one_snapshot(session: AsyncSession) -> AsyncIterator[None]:
    """Makes all statements in the block read the same snapshot, and limits each to `STATEMENT_MILLISECONDS`."""
    async with session.transaction():
        await session.execute(query("begin_snapshot"))
        await fetch(session, "limit_overview", {"milliseconds": STATEMENT_MILLISECONDS})
        yield


async def count_for_overview(session: AsyncSession) -> dict[str, BoundedCount]:
    """The number of emails by state, each up to a limit: `dead_letters`, `held`, `pending`, `sending`, `waiting`,
    `cancelled`."""
    rows = await fetch(session, "count_for_overview", {"limit": COUNTED, "undecided": COUNTED_UNDECIDED})
    return {name: BoundedCount(emails, emails >= _limit_of(name)) for name, emails in rows}


async def count_for_overview_of_tenant(session: AsyncSession, tenant_id: str) -> dict[str, BoundedCount]:
    """As `count_for_overview`, for one tenant."""
    parameters = {"limit": COUNTED, "undecided": COUNTED_UNDECIDED, "tenant_id": tenant_id}
    rows = await fetch(session, "count_for_overview_of_tenant", parameters)
    return {name: BoundedCount(emails, read >= _limit_of(name)) for name, emails, read in rows}


def _limit_of(name: str) -> int:
    return COUNTED_UNDECIDED if name in ("dead_letters", "held") else COUNTED


async def count_paused(session: AsyncSession) -> BoundedCount:
    """The number of pending emails that a pause of everything, of a lane or of a tenant stops."""
    ((paused, read),) = await fetch(session, "count_paused", {"limit": COUNTED})
    return BoundedCount(paused, read >= COUNTED)


@statement
async def measure_recent_latency(source: Source, *, limit: int = READ_FOR_LATENCY) -> Latency | None: ...
@statement
async def list_host_reports(source: Source) -> list[HostReport]: ...
@statement
async def list_rates(source: Source) -> list[ProviderRate]: ...


async def find_alert_check(session: AsyncSession, queue: str) -> AlertCheck | None:
    """The last check of the DLQ `queue`; None if no monitor has checked it."""
    for host, age_seconds, depth, fault, alerts in await fetch(session, "find_alert_check", {"queue": queue}):
        return AlertCheck(host, age_seconds, depth, fault, [active for alert in alerts if (active := _alert(alert))])
    return None


def _alert(stored: Any) -> ActiveAlert | None:
    """An alert as a monitor has stored it. Ignores other fields, because the monitor may be of a later release. None if
    the alert cannot be read."""
    try:
        return ActiveAlert(
            str(stored["kind"]),
            datetime.fromisoformat(stored["raised_at"]),
            stored.get("count"),
            stored.get("oldest_age_seconds"),
            stored.get("reason"),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
