"""Remembers which notices each channel has sent. All monitors share this state in PostgreSQL, and each monitor keeps a
copy in memory.

Normally, one monitor sends the alerts about a DLQ, and the other monitors only wait. While PostgreSQL is unreachable,
the monitors cannot agree on one monitor. So each monitor sends alerts, according to its own copy: repeated notices are
better than none. When PostgreSQL is reachable again, each monitor first stores the notices that it sent during the
outage, so that they are not sent again.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import NamedTuple

from dispatcher.domain.alert import Kind
from dispatcher.errors import DispatcherError
from dispatcher.store.alerts import AlertStore, AnnouncedAlert
from dispatcher.telemetry.log import get_log


class _Entry(NamedTuple):
    raised_at: datetime
    sent_at: float  # by the monotonic clock

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.sent_at


class AlertState:
    """The notices that each channel has sent. All calls must come from one event loop. While PostgreSQL does not
    answer, `is_alone`: this monitor sends alerts without an agreement with the others."""

    def __init__(self, store: AlertStore) -> None:
        self.is_alone = False
        self._store = store
        # By an alert's kind and a channel. In `_unsaved`, None means that the channel has announced the end of the
        # alert.
        self._sent: dict[tuple[Kind, str], _Entry] = {}
        self._unsaved: dict[tuple[Kind, str], _Entry | None] = {}
        self._lock = asyncio.Lock()

    async def refresh(self) -> bool:
        """Reads the shared state. Returns whether this monitor must make the checks and send the alerts, which is
        always so while PostgreSQL is unreachable."""
        async with self._lock:
            try:
                await self._save_all()
                is_ours, announced = await self._store.claim_alerting(), await self._store.list_announced()
            except DispatcherError as error:
                self._log_loss(error)
                return True
            if self.is_alone:
                self.is_alone = False
                get_log().info("store.connected")
            now = time.monotonic()
            self._sent = {(one.kind, one.channel): _Entry(one.raised_at, now - one.age_seconds) for one in announced}
            # A notice that a channel sent during the query is newer than the query's answer, so this notice counts.
            for key, entry in self._unsaved.items():
                self._set(*key, entry)
            return is_ours

    def age_seconds(self, kind: Kind, channel: str) -> float | None:
        """Seconds since a channel last sent a notice about an active alert; None if there is none since it was last
        resolved."""
        entry = self._sent.get((kind, channel))
        return None if entry is None else entry.age_seconds

    def raised_at(self, kind: Kind) -> datetime | None:
        """When the active alert of this kind was raised, by the notices about it; None if there are none."""
        return min((entry.raised_at for (one, _), entry in self._sent.items() if one is kind), default=None)

    async def record(self, kind: Kind, channel: str, raised_at: datetime | None) -> None:
        """Records that a channel has just sent a notice. `raised_at` is None if it says that the alert is resolved."""
        entry = None if raised_at is None else _Entry(raised_at, time.monotonic())
        self._set(kind, channel, entry)
        self._unsaved[kind, channel] = entry
        async with self._lock:
            if self.is_alone:
                return  # PostgreSQL does not answer; the next `refresh` stores this notice
            try:
                await self._save_all()
            except DispatcherError as error:
                self._log_loss(error)

    def _set(self, kind: Kind, channel: str, entry: _Entry | None) -> None:
        self._sent.pop((kind, channel), None)
        if entry is not None:
            self._sent[kind, channel] = entry

    async def _save_all(self) -> None:
        for key, entry in list(self._unsaved.items()):
            if entry is None:
                await self._store.delete_announced(*key)
            else:
                await self._store.save_announced(AnnouncedAlert(*key, entry.raised_at, entry.age_seconds))
            # If the channel sent a newer notice during the statement, the newer notice is still unsaved: keep it.
            if self._unsaved.get(key) is entry:
                del self._unsaved[key]

    def _log_loss(self, error: DispatcherError) -> None:
        if not self.is_alone:
            get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=None)
        self.is_alone = True
