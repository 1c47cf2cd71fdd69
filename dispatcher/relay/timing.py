"""Two services of the leading relay: the first wakes waiting emails at their times, the second cancels expired
emails."""

from __future__ import annotations

from typing import Final

from dispatcher.store.outbox import Outbox
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

BATCH: Final = 500
"""The most emails per round: as many as the relay publishes between two rounds. So if 100,000 emails are scheduled for
the same second, they do not delay emails that are already due."""
WAKE_SECONDS: Final = 0.25
"""The longest wait until the relay looks for waiting emails again. It is short, because an application may enqueue an
email that is due before all others."""
PACE_SECONDS: Final = 0.02
"""The shortest wait after a batch that was not full. Emails that become due during the wait share one statement."""
EXPIRE_SECONDS: Final = 1.0
"""How often the relay cancels expired emails. An expired email is not sent, even before it is cancelled."""


class WaitingEmails:
    """Wakes waiting emails when their time has come: it makes them pending and due."""

    interval_seconds = WAKE_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def run_once(self) -> float:
        seconds = await self._outbox.find_next_wake()
        if seconds is None or seconds > 0:
            return WAKE_SECONDS if seconds is None else min(max(seconds, PACE_SECONDS), WAKE_SECONDS)
        woken = await self._outbox.wake(BATCH)
        if woken == BATCH:
            return 0.0
        return PACE_SECONDS if woken else WAKE_SECONDS  # none woken: other transactions lock the rows, so wait longer


class ExpiredEmails:
    """Cancels pending, waiting and held emails whose `expires_at` has passed."""

    interval_seconds = EXPIRE_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def run_once(self) -> float:
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
