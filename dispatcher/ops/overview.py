"""Reads all figures of the Overview, the first view of the operators' page. Each query reads a limited number of rows.
Simultaneous visitors share one reading."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Self

from dispatcher.config import Settings
from dispatcher.domain.controls import Controls, Pause, PauseScope
from dispatcher.domain.stats import Per, SplitCount, Stats
from dispatcher.domain.turns import LaneWeights
from dispatcher.domain.waiting import ProviderProblem
from dispatcher.ops.hosts import Host, hosts_of
from dispatcher.ops.shared_reading import FRESH_SECONDS, Answer, SharedReading
from dispatcher.store import figures
from dispatcher.store.connections import AsyncSession
from dispatcher.store.controls import read_controls
from dispatcher.store.figures import COUNTED, AlertCheck, Attempts, BoundedCount, Latency, Pace
from dispatcher.store.providers import ProviderRate, find_troubles, list_rates
from dispatcher.store.samples import MinuteSample, Trend, list_samples, list_trend
from dispatcher.store.stats import list_stats, split_stats

OLD_SAMPLE_SECONDS: Final = 90.0
"""If the newest sample is older than this, no monitor writes samples."""
MONTH_FRESH_SECONDS: Final = 60.0
"""How long the attempts per day are kept before they are read again. They are summed from many rows, and change
slowly."""
TRENDS_FRESH_SECONDS: Final = 5.0
"""How long `Trends` are kept before they are read again. They are computed from thousands of rows."""
MAX_TENANTS: Final = 256
"""The most tenants whose figures are kept."""
MINUTES: Final = 60
DAYS: Final = 31
MOST_SERIES: Final = 5
"""How many lanes, providers or tenants a chart shows on their own."""
OTHERS: Final = "(others)"
_HOUR_SECONDS: Final = 3600.0
_DAY_SECONDS: Final = 86_400.0
ACCEPTED: Final = "accepted"


@dataclass(frozen=True, slots=True)
class Point:
    """How many attempts of one minute, hour or day sent an email, and how many did not (deferred, rejected, uncertain).
    None if unknown, because no monitor took a sample. For a tenant, how many emails were sent, and how many failed."""

    begins_at: datetime
    sent: int | None
    not_sent: int | None


@dataclass(frozen=True, slots=True)
class ProviderFigures:
    """A provider, as the Overview shows it.

    Attributes:
        problem: The worst problem that workers report; None if all workers can use the provider.
        rate: How many emails per second all hosts together may send now; None if the provider has no ceiling, or has
            not sent an email yet.
        ceiling: The most emails per second, by this host's settings.
        sent: Emails that the provider accepted in the current hour and the 23 hours before.
        not_sent: Attempts with other outcomes in the same hours.
    """

    name: str
    problem: ProviderProblem | None
    pause: Pause | None
    rate: ProviderRate | None
    ceiling: float | None
    sent: int
    not_sent: int


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """A lane, as the Overview shows it. `messages` (which wait on the lane's
    send queue) and `workers` are None if unknown."""

    name: str
    weight: float
    messages: int | None
    workers: int | None
    pause: Pause | None


class DayFigures(NamedTuple):
    """The emails of 24 hours."""

    sent: int = 0
    delivered: int = 0
    bounced: int = 0

    @classmethod
    def of(cls, rows: Iterable[Stats]) -> Self:
        return cls(*map(sum, zip(*((each.sent, each.delivered, each.bounced) for each in rows), strict=True)))


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures of the Overview for one visitor.

    If the visitor may see only one tenant, only `taken_at`, `counts`, `hours` and `days` are filled.

    Attributes:
        counts: The emails of all tenants, or of the visitor's tenant, by state: `pending`, `sending`, `waiting`,
            `cancelled`, and `dead_letters` and `held` without those whose dead letter an operator has discarded.
        paused: Pending emails that an operator paused; None if they were not counted.
        sample: The newest of the counts that a monitor stores every minute; None if none is stored.
        day: The emails of the last 24 hours: sent, delivered and bounced, as the statistics count them.
        paces: How fast each `host` and each `provider` sent lately, by the kind and the name.
        trend: What monitors found in the last 24 hours, ten minutes each; oldest first.
        check: The last check of the DLQ, with the active alerts; None if no monitor has checked yet.
    """

    taken_at: datetime
    counts: Mapping[str, BoundedCount]
    paused: BoundedCount | None = None
    oldest_pending_seconds: float | None = None
    longest_due_seconds: float | None = None
    latency: Latency | None = None
    day: DayFigures = field(default_factory=DayFigures)
    paces: Mapping[tuple[str, str], Pace] = field(default_factory=dict)
    trend: Sequence[Trend] = ()
    minutes: Sequence[Point] = ()
    hours: Sequence[Point] = ()
    days: Sequence[Point] = ()
    hosts: Sequence[Host] = ()
    providers: Sequence[ProviderFigures] = ()
    lanes: Sequence[LaneFigures] = ()
    sample: MinuteSample | None = None
    check: AlertCheck | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether the newest sample is recent, which shows that a monitor is running and writes samples."""
        return self.sample is not None and self.sample.age_seconds < OLD_SAMPLE_SECONDS


class Trends(NamedTuple):
    """The figures that are read less often: the longest waits (see `find_oldest_pending`), the latency and the
    paces of the newest emails, and the attempts of the last 24 hours, by hour."""

    oldest_pending_seconds: float | None
    longest_due_seconds: float | None
    latency: Latency | None
    paces: Sequence[Pace]
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
        self._settings = settings
        self._open_session = open_session
        self._days = SharedReading(self._read_days, fresh_seconds=MONTH_FRESH_SECONDS)
        self._trends = SharedReading(self._read_trends, fresh_seconds=trends_fresh_seconds)
        self._all = SharedReading(self._read_all, fresh_seconds=fresh_seconds)
        self._splits: dict[tuple[Per, Per, str | None], SharedReading[list[SplitCount]]] = {}
        self._tenants: OrderedDict[str, SharedReading[Overview]] = OrderedDict()

    async def get(self, tenant_id: str | None) -> Answer[Overview]:
        """The Overview of one tenant, or of all; at most two seconds old. `Trends` may be five seconds old, and the
        attempts per day a minute.

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

    async def _read_days(self) -> tuple[list[Attempts], list[Trend], DayFigures]:
        async with self._open_session() as session, figures.one_snapshot(session):
            attempts = await figures.sum_attempts(session, "day", (DAYS - 1) * _DAY_SECONDS)
            return attempts, await list_trend(session), DayFigures.of(await _stats(session, Per.HOUR))

    async def _read_trends(self) -> Trends:
        async with self._open_session() as session, figures.one_snapshot(session):
            oldest = await figures.find_oldest_pending(session, limit=COUNTED)
            latency, paces = await figures.measure_latency(session), await figures.measure_paces(session)
            return Trends(*oldest, latency, paces, await figures.sum_attempts(session, "hour", 23 * _HOUR_SECONDS))

    async def _read_split(self, per: Per, split: Per, tenant_id: str | None) -> list[SplitCount]:
        async with self._open_session() as session:
            return await split_stats(
                session, is_day=per is Per.DAY, since=_begins(per)[0], split=split, tenant_id=tenant_id
            )

    async def split(self, per: Per, split: Per, tenant_id: str | None) -> dict[str, list[int]]:
        """How many emails were sent in each of the last 24 hours, or of the last 31 days, by lane, provider or tenant:
        the five largest, and all others together. At most a minute old."""
        key = (per, split, tenant_id)
        if key not in self._splits:
            if len(self._splits) >= MAX_TENANTS:
                self._splits.clear()
            self._splits[key] = SharedReading(lambda: self._read_split(*key), fresh_seconds=MONTH_FRESH_SECONDS)
        rows = (await self._splits[key].get()).value
        totals = Counter[str]()
        for each in rows:
            totals[each.name] += each.sent
        largest = [name for name, _ in totals.most_common(MOST_SERIES)]
        begins = _begins(per)
        at = {begins_at: number for number, begins_at in enumerate(begins)}
        found = {name: [0] * len(begins) for name in (*largest, *([OTHERS] if len(totals) > MOST_SERIES else []))}
        for each in rows:
            if (number := at.get(each.begins_at.astimezone(UTC))) is not None:
                found[each.name if each.name in largest else OTHERS][number] += each.sent
        return found

    async def _read_tenant(self, tenant_id: str) -> Overview:
        async with self._open_session() as session, figures.one_snapshot(session):
            counts = await figures.count_for_overview(session, tenant_id=tenant_id)
            hours, days = [await _stats(session, per, tenant_id) for per in (Per.HOUR, Per.DAY)]
        now, day = datetime.now(UTC), DayFigures.of(hours)
        return Overview(now, counts, day=day, hours=_points_of(hours, Per.HOUR), days=_points_of(days, Per.DAY))

    async def _read_all(self) -> Overview:
        days, trend, day = (await self._days.get()).value
        trends = await self._trends.fresh()  # if this fails, `SharedReading` returns the last Overview
        settings, now = self._settings, datetime.now(UTC)
        async with self._open_session() as session, figures.one_snapshot(session):
            counts = await figures.count_for_overview(session, tenant_id=None)
            controls = await read_controls(session)
            paused = await figures.count_paused(session) if controls.pauses else BoundedCount(0)
            samples = await list_samples(session, MINUTES + 1)
            hosts = hosts_of(await figures.list_workers(session), await figures.list_host_reports(session), settings)
            troubles = {trouble.provider: trouble for trouble in await find_troubles(session)}
            rates = {each.provider: each for each in await list_rates(session)}
            check = await figures.find_alert_check(session, queue=settings.dlq)
        sample = samples[-1] if samples else None
        found = Overview(
            now,
            counts,
            paused,
            trends.oldest_pending_seconds,
            trends.longest_due_seconds,
            trends.latency,
            day,
            {("host", each.host) if each.host else ("provider", each.provider or ""): each for each in trends.paces},
            trend,
            points_of_minutes(samples, now),
            points(trends.hours, _begins(Per.HOUR)),
            points(days, _begins(Per.DAY)),
            hosts,
            _providers(settings, troubles, rates, controls.pauses, trends.hours),
            _lanes(settings, controls, sample),
            sample,
            check,
        )
        return _with_sample(found, sample) if sample is not None and found.is_sampled else found


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
    counts = Counter[tuple[datetime, bool]]()
    for each in attempts:
        counts[each.begins_at.astimezone(UTC), each.outcome == ACCEPTED] += each.emails
    return [Point(at, counts[at, True], counts[at, False]) for at in begins]


def _providers(
    settings: Settings,
    troubles: Mapping[str, ProviderProblem],
    rates: Mapping[str, ProviderRate],
    pauses: Sequence[Pause],
    hours: Sequence[Attempts],
) -> list[ProviderFigures]:
    """The providers of this host's settings in order, then other providers that hosts used or operators paused."""
    paused = {pause.name: pause for pause in pauses if pause.scope is PauseScope.PROVIDER}
    counts = Counter[tuple[str, bool]]()
    for each in hours:
        counts[each.provider, each.outcome == ACCEPTED] += each.emails
    names = dict.fromkeys([*settings.providers, *sorted({*troubles, *paused, *(name for name, _ in counts)})])
    return [
        ProviderFigures(
            name,
            troubles.get(name),
            paused.get(name),
            rates.get(name),
            settings.ceiling_of(name) if name in settings.own else None,
            counts[name, True],
            counts[name, False],
        )
        for name in names
    ]


def _lanes(settings: Settings, controls: Controls, sample: MinuteSample | None) -> list[LaneFigures]:
    queues = (sample.queues if sample else None) or {}
    weights = LaneWeights(settings.lanes)
    weights.update(controls.lanes)
    found = []
    for lane in settings.lanes:
        queue = queues.get(lane)
        messages, workers = (queue.messages, queue.workers) if queue else (None, None)
        found.append(LaneFigures(lane, weights.of(lane), messages, workers, controls.pause_of_lane(lane)))
    return found


def _with_sample(overview: Overview, sample: MinuteSample) -> Overview:
    """The Overview with the sample's figures where its own reading stopped at a limit."""
    pending_seconds, due_seconds = overview.oldest_pending_seconds, overview.longest_due_seconds
    return replace(
        overview,
        counts={
            # A sample also counts failed and held emails whose dead letters were discarded.
            name: replace(count, emails=max(count.emails, sample.emails.get(name, 0)))
            if count.is_cut and name not in ("dead_letters", "held")
            else count
            for name, count in overview.counts.items()
        },
        oldest_pending_seconds=sample.oldest_pending_seconds if pending_seconds is None else pending_seconds,
        longest_due_seconds=sample.longest_due_seconds if due_seconds is None else due_seconds,
    )


def _begins(per: Per) -> list[datetime]:
    """When each of the last 24 hours, or of the last 31 days, began."""
    this_hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    if per is Per.HOUR:
        return [this_hour - timedelta(hours=ago) for ago in reversed(range(24))]
    return [this_hour.replace(hour=0) - timedelta(days=ago) for ago in reversed(range(DAYS))]


async def _stats(session: AsyncSession, per: Per, tenant_id: str | None = None) -> list[Stats]:
    return await list_stats(session, per=per, since=_begins(per)[0], until=datetime.now(UTC), tenant_id=tenant_id)


def _points_of(rows: Sequence[Stats], per: Per) -> list[Point]:
    stats = {datetime.fromisoformat(each.name).replace(tzinfo=UTC): each for each in rows}
    known = [(at, stats.get(at)) for at in _begins(per)]
    return [Point(at, each.sent, each.failed) if each else Point(at, 0, 0) for at, each in known]
