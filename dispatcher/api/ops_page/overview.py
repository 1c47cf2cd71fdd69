"""The page Overview: what needs an operator, how much is sent, and the state of hosts, providers, lanes and alerts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.ops.overview import OverviewReader, Point
from dispatcher.store.figures import MISSED_REPORTS

STALE_SECONDS: Final = 3.0
"""If a query fails and the figures are older than this, the page shows a warning."""


def routes(site: Site) -> list[Route]:
    reader = OverviewReader(site.settings, site.session)

    async def show(request: Request, visitor: Visitor) -> Response:
        answer = await reader.get(visitor.tenant_id)
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
            charts=[
                chart
                for chart in (
                    Chart("sent-by-minute", "Sent per minute, last hour", "%H:%M", answer.value.minutes),
                    Chart("sent-by-hour", "Sent per hour, last day", "%m-%d %H:%M", answer.value.hours),
                    Chart("sent-by-day", "Sent per day, last 31 days", "%Y-%m-%d", answer.value.days),
                )
                if chart.points
            ],
            longest_check_seconds=MISSED_REPORTS * site.settings.dlq_probe_seconds,
            dlq=site.settings.dlq,
        )

    return [site.get("/", show)]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of how many emails were sent, and how many were not. `name` is its id on the page, and `shape` the
    `strftime` format of the times in its table."""

    name: str
    title: str
    shape: str
    points: Sequence[Point]

    @property
    def highest(self) -> int | None:
        """The most emails that were sent in one minute, hour or day; None if unknown."""
        return max((point.sent for point in self.points if point.sent is not None), default=None)

    @property
    def latest(self) -> Point | None:
        """The last point whose figures are known."""
        return next((point for point in reversed(self.points) if point.sent is not None), None)

    @property
    def data(self) -> str:
        """The chart's figures as JSON, for the attribute `data-chart` of the page."""
        series: list[dict[str, Any]] = [
            {"label": "sent", "colour": 1, "values": [point.sent for point in self.points]},
            {"label": "not sent", "colour": 2, "values": [point.not_sent for point in self.points]},
        ]
        begins = [int(point.begins_at.timestamp()) for point in self.points]
        return orjson.dumps({"x": begins, "series": series}).decode()
