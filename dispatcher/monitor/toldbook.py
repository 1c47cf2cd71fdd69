"""What each channel has told: shared by all monitors through PostgreSQL, and kept here while it is away.

One monitor holds the watch over a DLQ; it looks and tells, the others stand by. While PostgreSQL is away nobody knows
who that is, and each tells for itself by what it remembers: rather ten alerts than none. What was told meanwhile is
entered when PostgreSQL is back, before anything else, so that nothing is told twice from then on.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from dispatcher.domain.alert import Kind
from dispatcher.errors import DispatcherError
from dispatcher.monitor.patience import within
from dispatcher.store.alerts import AlertStore, Told
from dispatcher.telemetry.log import get_log

STORE_SECONDS: Final = 4.0
"""An alert waits no longer than this for a PostgreSQL that is silent."""
RELEASE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Entry:
    raised_at: datetime
    told_at: float  # in monotonic time

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self.told_at


Place = tuple[Kind, str]
"""An alert's kind, and the channel that told it."""


class ToldBook:
    """See the module. For one loop; every method may be called at any time.

    Attributes:
        is_alone: PostgreSQL does not answer.
    """

    def __init__(
        self,
        store: AlertStore,
        *,
        hold_seconds: float,
        store_seconds: float = STORE_SECONDS,
        release_seconds: float = RELEASE_SECONDS,
    ) -> None:
        """
        Args:
            hold_seconds: How long the watch stays with a monitor that has said nothing since.
            store_seconds: How long to wait for PostgreSQL.
            release_seconds: The same at the end, which a stop waits for.
        """
        self.is_alone = False
        self._store = store
        self._hold_seconds = hold_seconds
        self._store_seconds = store_seconds
        self._release_seconds = release_seconds
        self._told: dict[Place, _Entry] = {}
        self._unentered: dict[Place, _Entry | None] = {}
        self._lock = asyncio.Lock()
        self._log = get_log()

    async def consult(self) -> bool:
        """Reads what was told; returns whether this monitor is the one to look and tell."""
        async with self._lock:
            try:
                is_ours, told = await within(self._store_seconds, self._consult_store())
            except (DispatcherError, TimeoutError) as error:
                self._note_loss(error)
                return True
            self._note_return()
            now = time.monotonic()
            entries = {(one.kind, one.channel): _Entry(one.raised_at, now - one.age_seconds) for one in told}
            # What a channel told while we were asking.
            for place, entry in self._unentered.items():
                entries.pop(place, None)
                if entry is not None:
                    entries[place] = entry
            self._told = entries
            return is_ours

    def age_seconds(self, kind: Kind, channel: str) -> float | None:
        """How long ago a channel last told that an alert stands; None if it did not, or has told its end since."""
        entry = self._told.get((kind, channel))
        return None if entry is None else entry.age_seconds

    def raised_at(self, kind: Kind) -> datetime | None:
        """Since when an alert stands, by what was told; None if nothing was."""
        return min((entry.raised_at for (one, _), entry in self._told.items() if one is kind), default=None)

    async def note_told(self, kind: Kind, channel: str, raised_at: datetime) -> None:
        """A channel has just told that an alert stands."""
        self._told[kind, channel] = self._unentered[kind, channel] = _Entry(raised_at, time.monotonic())
        await self._try_to_enter()

    async def note_over(self, kind: Kind, channel: str) -> None:
        """A channel has just told an alert's end."""
        self._told.pop((kind, channel), None)
        self._unentered[kind, channel] = None
        await self._try_to_enter()

    async def release(self) -> None:
        """Leaves the watch to other monitors."""
        with suppress(DispatcherError, TimeoutError):
            await within(self._release_seconds, self._store.release_watch())

    async def _consult_store(self) -> tuple[bool, list[Told]]:
        await self._enter_all()
        return await self._store.hold_watch(self._hold_seconds), await self._store.list_told()

    async def _try_to_enter(self) -> None:
        async with self._lock:
            if self.is_alone:
                return  # the next `consult` does it
            try:
                await within(self._store_seconds, self._enter_all())
            except (DispatcherError, TimeoutError) as error:
                self._note_loss(error)

    async def _enter_all(self) -> None:
        for place, entry in list(self._unentered.items()):
            kind, channel = place
            if entry is None:
                await self._store.enter_over(kind, channel)
            else:
                await self._store.enter_told(Told(kind, channel, entry.raised_at, entry.age_seconds))
            # Unless the channel told something new meanwhile.
            if self._unentered.get(place) is entry:
                del self._unentered[place]

    def _note_loss(self, error: DispatcherError | TimeoutError) -> None:
        if self.is_alone:
            return
        self.is_alone = True
        reason = error.message if isinstance(error, DispatcherError) else "it does not answer in time"
        self._log.warning("store.connection_lost", reason=reason, retry_in_seconds=None)

    def _note_return(self) -> None:
        if self.is_alone:
            self.is_alone = False
            self._log.info("store.connected")
