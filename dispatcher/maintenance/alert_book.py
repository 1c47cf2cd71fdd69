"""What each channel has told: shared by all monitors through PostgreSQL, and kept here while it is away.

One monitor has the turn to alert about a DLQ, the others stand by. While PostgreSQL is away nobody knows who has the
turn, and each tells for itself by what it remembers: rather ten alerts than none. What was told meanwhile is entered
when PostgreSQL is back, before anything else, so that nothing is told twice from then on.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import NamedTuple

from dispatcher.domain.alert import Kind
from dispatcher.errors import DispatcherError
from dispatcher.store.alerts import AlertStore, Told
from dispatcher.telemetry.log import get_log


class _Entry(NamedTuple):
    raised_at: datetime
    told_at: float  # in monotonic time

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.told_at


class AlertBook:
    """For one loop; every method may be called at any time.

    Attributes:
        is_alone: PostgreSQL does not answer.
    """

    def __init__(self, store: AlertStore) -> None:
        self.is_alone = False
        self._store = store
        # Both by an alert's kind and the channel that told it.
        self._told: dict[tuple[Kind, str], _Entry] = {}
        self._unentered: dict[tuple[Kind, str], _Entry | None] = {}
        self._lock = asyncio.Lock()

    async def consult(self) -> bool:
        """Reads what was told; returns whether this monitor is the one to look and tell."""
        async with self._lock:
            try:
                await self._enter_all()
                is_ours, told = await self._store.take_watch(), await self._store.list_told()
            except DispatcherError as error:
                self._note_loss(error)
                return True
            if self.is_alone:
                self.is_alone = False
                get_log().info("store.connected")
            now = time.monotonic()
            self._told = {(one.kind, one.channel): _Entry(one.raised_at, now - one.age_seconds) for one in told}
            # What a channel told while we were asking.
            for place, entry in self._unentered.items():
                self._set(*place, entry)
            return is_ours

    def age_seconds(self, kind: Kind, channel: str) -> float | None:
        """How long ago a channel last told that an alert stands; None if it did not, or has told its end since."""
        entry = self._told.get((kind, channel))
        return None if entry is None else entry.age_seconds

    def raised_at(self, kind: Kind) -> datetime | None:
        """Since when an alert stands, by what was told; None if nothing was."""
        return min((entry.raised_at for (one, _), entry in self._told.items() if one is kind), default=None)

    async def note(self, kind: Kind, channel: str, raised_at: datetime | None) -> None:
        """A channel has just told that an alert stands since then; None: that it is over."""
        entry = None if raised_at is None else _Entry(raised_at, time.monotonic())
        self._set(kind, channel, entry)
        self._unentered[kind, channel] = entry
        async with self._lock:
            if self.is_alone:
                return  # the next `consult` does it
            try:
                await self._enter_all()
            except DispatcherError as error:
                self._note_loss(error)

    def _set(self, kind: Kind, channel: str, entry: _Entry | None) -> None:
        self._told.pop((kind, channel), None)
        if entry is not None:
            self._told[kind, channel] = entry

    async def _enter_all(self) -> None:
        for place, entry in list(self._unentered.items()):
            if entry is None:
                await self._store.enter_over(*place)
            else:
                await self._store.enter_told(Told(*place, entry.raised_at, entry.age_seconds))
            # Unless the channel told something new meanwhile.
            if self._unentered.get(place) is entry:
                del self._unentered[place]

    def _note_loss(self, error: DispatcherError) -> None:
        if not self.is_alone:
            get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=None)
        self.is_alone = True
