"""Show how many emails were sent, failed, bounced and so on, by day, hour, tenant, lane, provider or tag."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from dispatcher.actions.action import Listing, Reach, field
from dispatcher.domain.api_key import Scope
from dispatcher.domain.kinds import FILTER_TEXT, SINCE, TENANT, one_of
from dispatcher.domain.stats import Per, Stats

DEFAULT_DAYS: Final = 7


class ListStats(
    Listing[Stats], name="stats", http="GET /v1/stats", query="list_stats", scope=Scope.READ, reach=Reach.SEEN_TENANTS
):
    """Show how many emails were sent, failed, bounced, complained and so on, with shares in percent.

    An email counts in the hour when it was sent, or became failed or held. What happens to it later counts in the
    same hour, so the bounces of a day are the bounces of the emails of this day. The counts are about two minutes old.

    An email counts once for each kind of event, and under its first tag. `(none)` are emails without a tag or with
    erased content, `(other)` are the small tenants or tags of an hour with very many. `failed` is without `suppressed`
    emails. `failed_percent` is of the sent and the failed emails, the other shares are of the sent emails.

    Days and hours are in UTC. Hours are kept for 35 days, and days for 400.
    """

    per: Per = field(one_of(Per), "What the counts are grouped by.", default=Per.DAY)
    tenant_id: str | None = field(TENANT, "Only emails of this tenant.", default=None)
    lane: str | None = field(FILTER_TEXT, "Only emails of this lane.", default=None)
    provider: str | None = field(FILTER_TEXT, "Only emails of this provider.", default=None)
    tag: str | None = field(FILTER_TEXT, "Only emails whose first tag this is.", default=None)
    since: datetime | None = field(
        SINCE, "Only since the hour (older than 34 days: the day) of this time; by default, 7 days ago.", default=None
    )
    until: datetime | None = field(SINCE, "Only before this time; by default, until now.", default=None)

    nothing = "No email was counted in this time. Counts are about two minutes old."
    examples = ("stats --per tenant --since 24h", "stats --per day --tenant acme --json")

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        del source, settings
        now = datetime.now(UTC)
        return {"since": self.since or now - timedelta(days=DEFAULT_DAYS), "until": self.until or now}


ACTIONS = (ListStats,)
