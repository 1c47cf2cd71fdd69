"""Makes emails due when their time has come, and cancels emails that have expired. Services of the leading relay."""

from __future__ import annotations

from typing import Final

from dispatcher.store.outbox import Outbox
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

BATCH: Final = 500
"""The most emails per round: as many as the relay publishes between two rounds. So if 100,000 emails are scheduled for
the same second, they do not delay emails that are already due."""
WAKE_SECONDS: Final = 0.25
"""The longest wait before the relay looks for the next scheduled email, which may have been enqueued meanwhile."""
PACE_SECONDS: Final = 0.02
"""The shortest wait after a batch that was not full. Emails that become due during the wait share one statement."""
EXPIRE_SECONDS: Final = 1.0
"""How often the relay cancels expired emails. An expired email is not sent, even before it is cancelled."""


class WaitingEmails:
    """Makes scheduled emails, and emails that wait for a redelivery, pending and due."""

    interval_seconds = WAKE_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def run_once(self) -> float:
        """Wakes a batch. Returns the seconds until the next email is due, at most `WAKE_SECONDS`."""
        seconds = await self._outbox.find_next_wake()
        if seconds is None or seconds > 0:
            return WAKE_SECONDS if seconds is None else min(max(seconds, PACE_SECONDS), WAKE_SECONDS)
        woken = await self._outbox.wake(BATCH)
        if woken == BATCH:
            return 0.0
        return PACE_SECONDS if woken else WAKE_SECONDS  # none: other transactions have locked all of them


class ExpiredEmails:
    """Cancels emails that have expired before they were sent, and held emails that have expired."""

    interval_seconds = EXPIRE_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def run_once(self) -> float:
        """Cancels a batch. Returns the seconds until the next round."""
        cancelled = await self._outbox.cancel_expired(BATCH)
        metrics.CANCELLED.add(len(cancelled), "expired")
        for email in cancelled:
            get_log().info(
                "email.cancelled",
                email_id=str(email.email_id),
                correlation_id=email.correlation_id,
                previous_status=email.previous_status,
                reason="expired",
            )
        return 0.0 if len(cancelled) == BATCH else EXPIRE_SECONDS
