"""Sends the notices of alerts through one channel. A channel that fails does not affect the other channels."""

from __future__ import annotations

import asyncio
import random
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

from dispatcher.domain.alert import Alert, Channel, Kind, NotDelivered, Notice, Phase, next_phase
from dispatcher.domain.retry import Backoff
from dispatcher.monitor.alert_checks import AlertChecks
from dispatcher.monitor.alert_state import AlertState
from dispatcher.telemetry.log import get_log

FIRST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 60.0


@dataclass(eq=False, repr=False)
class AlertSender:
    """Sends the due notices through one channel. The monitor runs one such task per channel.

    If a channel does not accept a notice, the task sends the notice again, with current facts and the same id. A notice
    may arrive twice if the channel's answer was lost, or if this process ended before it stored the notice. No notice
    is dropped.
    """

    channel: Channel
    checks: AlertChecks
    state: AlertState
    _: KW_ONLY
    reminder_seconds: float
    first_wait_seconds: float = FIRST_WAIT_SECONDS

    def __post_init__(self) -> None:
        self._backoff = Backoff(base_seconds=self.first_wait_seconds, cap_seconds=LONGEST_WAIT_SECONDS)
        self._checked = self.checks.subscribe()
        self._ids: dict[tuple[Kind, Phase], str] = {}
        self._log = get_log()

    async def run(self) -> None:
        """Sends the due notices after each check, until cancelled."""
        while True:
            await self._checked.wait()
            self._checked.clear()
            while not await self._send_due():
                pass

    async def _send_due(self) -> bool:
        """Sends all due notices, and returns True. If the channel does not accept one, waits and returns False."""
        for alert in list(self.checks.alerts.values()):
            age_seconds = self.state.age_seconds(alert.kind, self.channel.name)
            phase = next_phase(
                is_firing=alert.is_firing, notice_age_seconds=age_seconds, reminder_seconds=self.reminder_seconds
            )
            if phase is not None and not await self._send(alert, phase):
                return False
        return True

    async def _send(self, alert: Alert, phase: Phase) -> bool:
        fields = {"channel": self.channel.name, "kind": alert.kind, "phase": phase}
        notice_id = self._ids.setdefault((alert.kind, phase), f"alert_{uuid4().hex}")
        try:
            await self.channel.send(Notice(notice_id, phase, datetime.now(UTC), alert))
        except NotDelivered as error:
            # Wait at least half of the backoff, because very short waits would fill the log.
            seconds = self._backoff.next_wait(lambda: 0.5 + random.random() / 2)  # noqa: S311
            self._log.error("alert.delivery_failed", **fields, reason=error.reason, retry_in_seconds=round(seconds, 2))
            await asyncio.sleep(seconds)
            return False
        self._ids = {key: value for key, value in self._ids.items() if key[0] is not alert.kind}
        if self._backoff.reset():
            self._log.info("alert.channel_recovered", **fields)
        await self.state.record(alert.kind, self.channel.name, None if phase is Phase.RESOLVED else alert.raised_at)
        return True
