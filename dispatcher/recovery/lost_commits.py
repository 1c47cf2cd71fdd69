"""Marks emails as uncertain after the promotion of a standby that may lack the old primary's last commits.

Every email that is leased or due becomes uncertain: it may already have been sent. The leading relay records
PostgreSQL's timeline each second, and detects the promotion after it has reconnected. Then `lost_host` and
`lost_message` recover the emails by policy (docs/protocol.md).
"""

from __future__ import annotations

from dispatcher.errors import StatementRefused, StoreUnavailable
from dispatcher.store.outbox import Outbox
from dispatcher.telemetry.log import get_log


class LostCommits:
    """A service of the leading relay: marks the emails that a promotion of a standby made uncertain. The first round
    runs before anything is published."""

    interval_seconds = 1.0

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def run_once(self) -> None:
        """Records PostgreSQL's timeline. After a promotion, marks the emails that became uncertain."""
        try:
            promotion = await self._outbox.follow_timeline()
        except StatementRefused as error:
            # Nothing may be published before all uncertain emails are marked.
            raise StoreUnavailable(f"PostgreSQL cannot mark the uncertain emails: {error.message}") from error
        if promotion is None:
            return
        log = get_log().error if promotion.is_lossy else get_log().info
        log(
            "store.promoted",
            timeline=promotion.timeline,
            previous_timeline=promotion.previous_timeline,
            lossy=promotion.is_lossy,
            leases=promotion.lease_count,
            messages=promotion.message_count,
        )
