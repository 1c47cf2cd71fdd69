"""Tells people how the alerts stand, through one channel; another channel's troubles are none of this one's."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

from dispatcher.alerts.contract import Channel, NotDelivered
from dispatcher.domain.alert import Alert, Kind, Notice, Phase, next_phase
from dispatcher.domain.backoff import Backoff
from dispatcher.maintenance.alert_book import AlertBook
from dispatcher.maintenance.dlq_alert import DlqAlert
from dispatcher.telemetry.log import get_log

FIRST_WAIT_SECONDS: Final = 1.0
LONGEST_WAIT_SECONDS: Final = 60.0


class Announcer:
    """A task of the monitor.

    What a channel did not take is told again with what is known by then, under the same id. A notice may arrive twice,
    when its answer got lost or this process ended before it could be entered; never not at all.
    """

    def __init__(
        self,
        channel: Channel,
        watch: DlqAlert,
        book: AlertBook,
        *,
        reminder_seconds: float,
        first_wait_seconds: float = FIRST_WAIT_SECONDS,
    ) -> None:
        self._channel = channel
        self._watch = watch
        self._book = book
        self._reminder_seconds = reminder_seconds
        self._backoff = Backoff(base_seconds=first_wait_seconds, cap_seconds=LONGEST_WAIT_SECONDS)
        self._news = watch.listen()
        self._ids: dict[tuple[Kind, Phase], str] = {}
        self._log = get_log()

    async def run(self) -> None:
        """Tells whatever is due after each look, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while not await self._tell_all():
                pass

    async def _tell_all(self) -> bool:
        """Tells all that is due; returns False, after a wait, where the channel did not take a notice."""
        for alert in list(self._watch.alerts.values()):
            age_seconds = self._book.age_seconds(alert.kind, self._channel.name)
            phase = next_phase(
                stands=alert.stands, told_age_seconds=age_seconds, reminder_seconds=self._reminder_seconds
            )
            if phase is not None and not await self._tell(alert, phase):
                return False
        return True

    async def _tell(self, alert: Alert, phase: Phase) -> bool:
        fields = {"channel": self._channel.name, "kind": alert.kind, "phase": phase}
        notice_id = self._ids.setdefault((alert.kind, phase), f"alert_{uuid4().hex}")
        try:
            await self._channel.send(Notice(notice_id, phase, datetime.now(UTC), alert))
        except NotDelivered as error:
            # Half of a wait is certain: a jitter down to nothing would fill the log.
            seconds = self._backoff.next_wait(lambda: 0.5 + random.random() / 2)  # noqa: S311
            self._log.error("alert.delivery_failed", **fields, reason=error.reason, retry_in_seconds=round(seconds, 2))
            await asyncio.sleep(seconds)
            return False
        self._ids = {key: value for key, value in self._ids.items() if key[0] is not alert.kind}
        if self._backoff.worked():
            self._log.info("alert.channel_recovered", **fields)
        await self._book.note(alert.kind, self._channel.name, None if phase is Phase.RESOLVED else alert.raised_at)
        return True
