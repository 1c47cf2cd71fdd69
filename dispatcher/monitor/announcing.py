"""Tells people how the DLQ stands, through one channel; another channel's troubles are none of this one's."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

from dispatcher.alerts.contract import Channel, NotDelivered
from dispatcher.domain.alert import Alert, Kind, Notice, Phase, next_phase
from dispatcher.domain.backoff import Backoff
from dispatcher.monitor.toldbook import ToldBook
from dispatcher.monitor.watch import Watch
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
        watch: Watch,
        book: ToldBook,
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
            await self._tell_until_taken()

    async def _tell_until_taken(self) -> None:
        seconds = await self._tell_all()
        while seconds is not None:
            await asyncio.sleep(seconds)
            seconds = await self._tell_all()

    async def _tell_all(self) -> float | None:
        """Tells all that is due; None when that worked, else the seconds until it is to be tried again."""
        for alert in list(self._watch.alerts.values()):
            phase = self._phase(alert)
            if phase is None:
                continue
            try:
                await self._tell(alert, phase)
            except NotDelivered as error:
                return self._next_try(alert, phase, error)
        return None

    def _phase(self, alert: Alert) -> Phase | None:
        age_seconds = self._book.age_seconds(alert.kind, self._channel.name)
        return next_phase(stands=alert.stands, told_age_seconds=age_seconds, reminder_seconds=self._reminder_seconds)

    async def _tell(self, alert: Alert, phase: Phase) -> None:
        notice_id = self._ids.setdefault((alert.kind, phase), new_notice_id())
        await self._channel.send(Notice(notice_id, phase, datetime.now(UTC), alert))
        self._forget_ids(alert.kind)
        if self._backoff.worked():
            self._log.info("alert.delivered", channel=self._channel.name, kind=alert.kind, phase=phase)
        if phase is Phase.RESOLVED:
            await self._book.note_over(alert.kind, self._channel.name)
        else:
            await self._book.note_told(alert.kind, self._channel.name, alert.raised_at)

    def _next_try(self, alert: Alert, phase: Phase, error: NotDelivered) -> float:
        seconds = self._backoff.next_wait(_half_to_whole)
        self._log.error(
            "alert.undelivered",
            channel=self._channel.name,
            kind=alert.kind,
            phase=phase,
            reason=error.reason,
            retry_in_seconds=round(seconds, 2),
        )
        return seconds

    def _forget_ids(self, kind: Kind) -> None:
        self._ids = {key: value for key, value in self._ids.items() if key[0] is not kind}


def new_notice_id() -> str:
    """Never seen before or again."""
    return f"alert_{uuid4().hex}"


def _half_to_whole() -> float:
    # Half of a wait is certain: a jitter down to nothing would fill the log.
    return 0.5 + random.random() / 2  # noqa: S311
