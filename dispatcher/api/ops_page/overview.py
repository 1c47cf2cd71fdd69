"""The page Overview: what needs an operator, how much is sent, and the state of hosts, providers, lanes and alerts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page.reported_events import LIMITS
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.domain.stats import Per
from dispatcher.ops.overview import Overview, OverviewReader
from dispatcher.store.figures import MISSED_REPORTS

STALE_SECONDS: Final = 3.0
"""If a query fails and the figures are older than this, the page shows a warning."""


RANGES: Final = {
    "hour": ("last hour, per minute", "%H:%M"),
    "day": ("last 24 hours, per hour", "%m-%d %H:%M"),
    "month": ("last 31 days, per day", "%Y-%m-%d"),
}
SPLITS: Final = ("outcome", Per.PROVIDER, Per.LANE, Per.TENANT)


def routes(site: Site) -> list[Route]:
    reader = OverviewReader(site.settings, site.session)

    async def show(request: Request, visitor: Visitor) -> Response:
        answer = await reader.get(visitor.tenant_id)
        names = [name for name in RANGES if name != "hour" or visitor.tenant_id is None]
        chosen = [request.query_params.get(name, "") for name in ("range", "split")]
        of = chosen[0] if chosen[0] in names else names[0]
        splits = [
            each for each in SPLITS if each == "outcome" or (of != "hour" and each != (visitor.tenant_id and "tenant"))
        ]
        split = chosen[1] if chosen[1] in splits else "outcome"
        counts = None
        if split != "outcome":
            counts = await reader.split(Per.DAY if of == "month" else Per.HOUR, Per(split), visitor.tenant_id)
        return await site.page(
            request,
            visitor,
            "overview.html",
            # After a fault, do not share a rendered page between refreshes: the page can show the age of its figures,
            # which grows.
            shared=None if answer.fault else answer.value,
            overview=answer.value,
            stale_seconds=answer.age_seconds if answer.fault and answer.age_seconds > STALE_SECONDS else None,
            fault=answer.fault,
            charts=[_sent(answer.value, of, counts), *_trends(answer.value)],
            ranges=names,
            range=of,
            splits=splits,
            split=split,
            bounce_limit=LIMITS["bounced (hard)"],
            longest_check_seconds=MISSED_REPORTS * site.settings.dlq_probe_seconds,
            dlq=site.settings.dlq,
        )

    return [site.get("/", show)]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. `name` is its id on the page, `shape` the `strftime` format of the times in its table, and a colour is a
    number of the style sheet."""

    name: str
    title: str
    shape: str
    begins: Sequence[datetime]
    series: Mapping[str, Sequence[float | None]]

    @property
    def latest(self) -> Mapping[str, float]:
        """The last figure of each series that is known."""
        known = {name: [each for each in values if each is not None] for name, values in self.series.items()}
        return {name: values[-1] for name, values in known.items() if values}

    @property
    def data(self) -> str:
        """The chart's figures as JSON, for the attribute `data-chart` of the page."""
        series = [{"label": name, "values": values} for name, values in self.series.items()]
        return orjson.dumps({"x": [int(each.timestamp()) for each in self.begins], "series": series}).decode()


def _sent(overview: Overview, of: str, counts: Mapping[str, Sequence[int]] | None) -> Chart:
    words, shape = RANGES[of]
    points = {"hour": overview.minutes, "day": overview.hours, "month": overview.days}[of]
    outcomes = {"sent": [each.sent for each in points], "not sent": [each.not_sent for each in points]}
    begins = [each.begins_at for each in points]
    return Chart("sent-chart", f"Sent, {words}", shape, begins, outcomes if counts is None else counts)


def _trends(overview: Overview) -> Iterator[Chart]:
    """How long emails waited, and the depth of the DLQ; if monitors have measured them."""
    begins, shape = [each.begins_at for each in overview.trend], RANGES["day"][1]
    waits = {"median": "p50_seconds", "99 %": "p99_seconds", "longest due": "longest_due_seconds"}
    for name, title, columns in (
        ("latency-chart", "Seconds to a provider, last 24 hours", waits),
        ("dlq-chart", "Messages on the dead letter queue, last 24 hours", {"messages": "dlq_messages"}),
    ):
        if begins:
            series = {label: [getattr(each, column) for each in overview.trend] for label, column in columns.items()}
            yield Chart(name, title, shape, begins, series)
