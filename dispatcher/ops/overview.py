"""Reads all figures of the Overview, the first view of the operators' page. Each query reads a limited number of rows.
Simultaneous visitors share one reading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from dispatcher.config import Settings
from dispatcher.domain.controls import Controls, Pause, PauseScope, seen_by
from dispatcher.domain.retry import longest_recovery_seconds
from dispatcher.domain.waiting import ProviderProblem
from dispatcher.errors import StoreUnavailable
from dispatcher.ops.figures import (
    OLD_SAMPLE_SECONDS,
    Counts,
    HostFigures,
    LaneFigures,
    Overview,
    Point,
    ProcessFigures,
    ProviderFigures,
)
from dispatcher.ops.shared_reading import FRESH_SECONDS, Answer, SharedReading
from dispatcher.store.activity import MISSED_REPORTS, Latency, WorkerSeen, find_vanished_hosts, list_workers
from dispatcher.store.connections import AsyncSession
from dispatcher.store.controls import read_controls
from dispatcher.store.counts import find_oldest_pending
from dispatcher.store.overview import (
    COUNTED,
    BoundedCount,
    HostReport,
    ProviderRate,
    count_for_overview,
    count_for_overview_of_tenant,
    count_paused,
    find_alert_check,
    list_host_reports,
    list_rates,
    measure_recent_latency,
    one_snapshot,
)
from dispatcher.store.providers import find_troubles
from dispatcher.store.samples import Attempts, MinuteSample, list_samples, sum_attempts

MONTH_FRESH_SECONDS: Final = 60.0
"""How long the attempts per day are kept before they are read again. They are summed from many rows, and change
slowly."""
TRENDS_FRESH_SECONDS: Final = 5.0
"""How long the latency, the waits of the oldest emails and the attempts per hour are kept before they are read again.
They are computed from thousands of rows."""
MAX_TENANTS: Final = 256
"""The most tenants whose figures are kept."""
MINUTES: Final = 60
DAYS: Final = 31
_HOUR_SECONDS: Final = 3600.0
_DAY_SECONDS: Final = 86_400.0
ACCEPTED: Final = "accepted"


@dataclass(frozen=True, slots=True)
class Trends:
    """The figures of the Overview that are read less often than its other figures.

    Attributes:
        pending_seconds: The longest wait of a pending email that is not paused; None if no such email is among the
            oldest pending emails.
        due_seconds: The longest time for which an email that is not paused has been due; None if no such email is among
            the oldest due emails.
        latency: The latency of the newest emails; None if no email was sent in the last ten minutes.
        hours: The attempts of the last 24 hours, by hour.
    """

    pending_seconds: float | None
    due_seconds: float | None
    latency: Latency | None
    hours: Sequence[Attempts]


class OverviewReader:
    """Reads the Overview for all visitors of one process."""

    def __init__(
        self,
        settings: Settings,
        open_session: Callable[[], AbstractAsyncContextManager[AsyncSession]],
        *,
        fresh_seconds: float = FRESH_SECONDS,
        trends_fresh_seconds: float = TRENDS_FRESH_SECONDS,
    ) -> None:
        """
        Args:
            fresh_seconds: How long an Overview for all tenants is kept.
            trends_fresh_seconds: How long `Trends` are kept.
        """
        self._settings = settings
        self._open_session = open_session
        self._days = SharedReading(self._read_days, fresh_seconds=MONTH_FRESH_SECONDS)
        self._trends = SharedReading(self._read_trends, fresh_seconds=trends_fresh_seconds)
        self._all = SharedReading(self._read_all, fresh_seconds=fresh_seconds)
        self._tenants: OrderedDict[str, SharedReading[Overview]] = OrderedDict()

    async def get(self, tenant_id: str | None) -> Answer[Overview]:
        """The Overview, at most two seconds old. `Trends` may be five seconds old, and the attempts per day a minute.

        Args:
            tenant_id: The visitor's tenant; None for a visitor who may see all tenants.

        Raises:
            DispatcherError: PostgreSQL could not be read, and this process has no earlier Overview to return.
        """
        if tenant_id is None:
            return await self._all.get()
        if tenant_id not in self._tenants:
            self._tenants[tenant_id] = SharedReading(lambda: self._read_tenant(tenant_id))
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant_id)
        return await self._tenants[tenant_id].get()

    async def _read_days(self) -> list[Attempts]:
        async with self._open_session() as session, one_snapshot(session):
            return await sum_attempts(session, "day", (DAYS - 1) * _DAY_SECONDS)

    async def _read_trends(self) -> Trends:
        async with self._open_session() as session, one_snapshot(session):
            pending_seconds, due_seconds = await find_oldest_pending(session, limit=COUNTED)
            latency = await measure_recent_latency(session)
            hours = await sum_attempts(session, "hour", 23 * _HOUR_SECONDS)
        return Trends(pending_seconds, due_seconds, latency, hours)

    async def _read_tenant(self, tenant_id: str) -> Overview:
        async with self._open_session() as session, one_snapshot(session):
            counts = await count_for_overview_of_tenant(session, tenant_id)
            controls = await read_controls(session)
        return Overview(datetime.now(UTC), Counts(**counts), seen_by(controls.pauses, tenant_id))

    async def _read_all(self) -> Overview:
        days, trends = await self._days.get(), await self._trends.get()
        if trends.fault is not None:  # `SharedReading` handles the error: it returns the last Overview
            raise StoreUnavailable(trends.fault)
        async with self._open_session() as session:
            return await read_overview(session, self._settings, days.value, trends.value)


async def read_overview(
    session: AsyncSession, settings: Settings, days: Sequence[Attempts], trends: Trends
) -> Overview:
    """The Overview: reads all figures from one snapshot, except those that the caller has already read.

    Args:
        days: The attempts per day of the last `DAYS` days.
        trends: The figures that are read less often.
    """
    now = datetime.now(UTC)
    async with one_snapshot(session):
        counts = await count_for_overview(session)
        controls = await read_controls(session)
        paused = await count_paused(session) if controls.pauses else BoundedCount(0)
        samples = await list_samples(session, MINUTES + 1)
        workers = await list_workers(session)
        reports = await list_host_reports(session)
        troubles = {trouble.provider: trouble for trouble in await find_troubles(session)}
        rates = {each.provider: each for each in await list_rates(session)}
        check = await find_alert_check(session, settings.dlq)
    pending_seconds, due_seconds = trends.pending_seconds, trends.due_seconds
    sample = samples[-1] if samples else None
    if sample is not None and sample.age_seconds < OLD_SAMPLE_SECONDS:
        counts = {name: _with_sample(name, count, sample) for name, count in counts.items()}
        pending_seconds = sample.oldest_pending_seconds if pending_seconds is None else pending_seconds
        due_seconds = sample.longest_due_seconds if due_seconds is None else due_seconds
    return Overview(
        now,
        Counts(**counts, paused=paused),
        controls.pauses,
        pending_seconds,
        due_seconds,
        trends.latency,
        points_of_minutes(samples, now),
        points(trends.hours, [_hour(now) - timedelta(hours=ago) for ago in reversed(range(24))]),
        points(days, [_day(now) - timedelta(days=ago) for ago in reversed(range(DAYS))]),
        hosts_of(workers, reports, settings),
        _providers(settings, troubles, rates, controls.pauses, trends.hours),
        _lanes(settings, controls, sample),
        sample,
        check,
    )


def points_of_minutes(samples: Sequence[MinuteSample], now: datetime) -> list[Point]:
    """A point for each of the last `MINUTES` minutes, oldest first.

    The numbers of a point are the difference between two samples; None if one of the samples is missing.
    """
    taken = {sample.minute: sample for sample in samples}
    this_minute = now.replace(second=0, microsecond=0)
    found = []
    for ago in reversed(range(MINUTES)):
        minute = this_minute - timedelta(minutes=ago)
        before, after = taken.get(minute - timedelta(minutes=1)), taken.get(minute)
        if before is None or after is None:
            found.append(Point(minute, None, None))
            continue
        new = {outcome: count - before.attempts.get(outcome, 0) for outcome, count in after.attempts.items()}
        sent = new.pop(ACCEPTED, 0)
        found.append(Point(minute, sent, sum(new.values())))
    return found


def points(attempts: Sequence[Attempts], begins: Sequence[datetime]) -> list[Point]:
    """A point for each hour or day, with the sums of its attempts. `begins` are the hours' or days' first instants."""
    sent, not_sent = dict.fromkeys(begins, 0), dict.fromkeys(begins, 0)
    for each in attempts:
        counted = sent if each.outcome == ACCEPTED else not_sent
        at = each.begins_at.astimezone(UTC)
        if at in counted:
            counted[at] += each.emails
    return [Point(at, sent[at], not_sent[at]) for at in begins]


def hosts_of(workers: Sequence[WorkerSeen], reports: Sequence[HostReport], settings: Settings) -> list[HostFigures]:
    """All hosts: the vanished hosts by name, then all other hosts by name."""
    longest_seconds = max(settings.alert_after_seconds, MISSED_REPORTS * settings.dlq_probe_seconds)
    last = {report.host: report for report in sorted(reports, key=lambda report: -report.age_seconds)}
    silent = {host: report.age_seconds for host, report in last.items() if report.age_seconds > longest_seconds}
    vanished = {host.name: host for host in find_vanished_hosts(workers, silent)}
    recovery_seconds = longest_recovery_seconds(settings.lease_seconds)
    found = []
    for name in {*last, *(worker.host for worker in workers)}:
        of_host = [report for report in reports if report.host == name]
        lost = vanished.get(name)
        end = lost.leases_end_in_seconds if lost else None
        found.append(
            HostFigures(
                name,
                last[name].version if name in last else None,
                last[name].age_seconds if name in last else None,
                _processes(of_host, [worker for worker in workers if worker.host == name]),
                lost,
                None if end is None else max(0.0, end) + recovery_seconds,
            )
        )
    return sorted(found, key=lambda host: (host.vanished is None, host.name))


def _processes(reports: Sequence[HostReport], workers: Sequence[WorkerSeen]) -> list[ProcessFigures]:
    """The processes of one host: those that the host reports, and unreported workers that have a session or leases."""
    by_pid = {_pid(worker): worker for worker in workers}
    found = []
    for report in reports:
        for each in report.processes or ():
            seen = by_pid.pop(each["pid"], None) if each["role"] == "worker" else None
            found.append(_process(each, seen, report.age_seconds))
    for pid, worker in by_pid.items():
        slot = worker.name.split(":")[1].removeprefix("w")
        state = "dead" if worker.age_seconds is None else "up"
        found.append(ProcessFigures(f"worker {slot}", pid, state, worker.age_seconds, worker.in_flight, None))
    return found


def _pid(worker: WorkerSeen) -> int | None:
    parts = worker.name.split(":")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdigit() else None


def _process(row: Mapping[str, Any], seen: WorkerSeen | None, report_seconds: float) -> ProcessFigures:
    is_worker = row["role"] == "worker"
    age_seconds = row["age_seconds"]
    if row["is_ending"]:
        state = "stopping"
    elif row["is_up"]:
        state = "up"
    else:
        state = "failing" if row["reason"] else "starting"
    return ProcessFigures(
        f"worker {row['number']}" if is_worker else row["role"],
        row["pid"],
        state,
        None if age_seconds is None else age_seconds + max(0.0, report_seconds),
        (seen.in_flight if seen else 0) if is_worker else None,
        row["restarts"],
        row["reason"] if state == "failing" else "",
    )


def _providers(
    settings: Settings,
    troubles: Mapping[str, ProviderProblem],
    rates: Mapping[str, ProviderRate],
    pauses: Sequence[Pause],
    hours: Sequence[Attempts],
) -> list[ProviderFigures]:
    """The providers of this host's settings in order, then other providers that hosts used or operators paused."""
    paused = {pause.name: pause for pause in pauses if pause.scope is PauseScope.PROVIDER}
    sent: dict[str, int] = {}
    not_sent: dict[str, int] = {}
    for each in hours:
        counted = sent if each.outcome == ACCEPTED else not_sent
        counted[each.provider] = counted.get(each.provider, 0) + each.emails
    names = dict.fromkeys([*settings.providers, *sorted({*troubles, *sent, *not_sent, *paused})])
    return [
        ProviderFigures(
            name,
            troubles.get(name),
            paused.get(name),
            rates.get(name),
            settings.ceiling_of(name) if name in settings.own else None,
            sent.get(name, 0),
            not_sent.get(name, 0),
        )
        for name in names
    ]


def _lanes(settings: Settings, controls: Controls, sample: MinuteSample | None) -> list[LaneFigures]:
    queues = (sample.queues if sample else None) or {}
    found = []
    for lane in settings.lanes:
        queue, policy = queues.get(lane), controls.lanes.get(lane)
        found.append(
            LaneFigures(
                lane,
                policy.weight if policy else None,
                queue.messages if queue else None,
                queue.workers if queue else None,
                controls.pause_of_lane(lane),
            )
        )
    return found


def _with_sample(name: str, count: BoundedCount, sample: MinuteSample) -> BoundedCount:
    """The count with this name. If the counting stopped at its limit, the sample's count replaces a smaller count.

    The counts `dead_letters` and `held` are always returned unchanged.
    """
    # A sample also counts failed and held emails whose dead letters were discarded. So the sample does not replace the
    # counts of dead letters and held emails.
    if not count.is_cut or name in ("dead_letters", "held"):
        return count
    return replace(count, emails=max(count.emails, sample.emails.get(name, 0)))


def _hour(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)


def _day(at: datetime) -> datetime:
    return _hour(at).replace(hour=0)
