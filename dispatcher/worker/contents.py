"""Content that is read when its email is about to be sent, and not with its lease: large bodies, and all attachments.

Such emails share a bound on memory. One that does not fit waits, and the others of the worker go on. Content of up to
LIGHT_OCTETS has a share of its own, so that it never waits for large files. Where many wait already, an email is given
back for later: its place in the worker's window is worth more to others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar
from uuid import UUID

from dispatcher.errors import AnswerTooLarge, StatementRefused, StoreUnavailable
from dispatcher.store.leases import LeaseStore
from dispatcher.worker.in_flight_email import Event, InFlightEmail
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.window import Window

T = TypeVar("T")

OVERHEAD_OCTETS: Final = 64 * 1024
"""What any email takes beside its content."""
LIGHT_OCTETS: Final = 1024 * 1024
LIGHT_SHARE: Final = 4
"""One in so many parts of the memory is for light content."""
WAITING_SHARE: Final = 8
"""One in so many parts of the window may wait for memory of each kind. They are next, and keep their leases."""
SOONEST_SECONDS: Final = 2.0
"""Until an email comes back that was given back for later."""
LATEST_SECONDS: Final = 60.0


class NoMemory(Exception):
    """Too many emails wait for memory. Never leaves the worker.

    Attributes:
        away_seconds: How long the email is to stay out of the queue.
    """

    def __init__(self, away_seconds: float) -> None:
        super().__init__()
        self.away_seconds = away_seconds


class Memory:
    """A bound on octets, handed out in the order in which they were asked for."""

    def __init__(self, octets: int, *, most_waiting: int) -> None:
        self._octets = octets
        self._most_waiting = most_waiting
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._given_at = 0.0
        self._seconds_each = SOONEST_SECONDS
        self._back_at = 0.0

    def take(self, octets: int) -> asyncio.Future[None] | None:
        """Takes so many: None if they are free, else a future to await. More than there are in all are granted alone.

        Raises:
            NoMemory: too many wait already.
        """
        if not self._waiting and self._fits(octets):
            self._taken += octets
            return None
        if len(self._waiting) >= self._most_waiting:
            raise NoMemory(self.later())
        place = self._loop.create_future()
        self._waiting.append((octets, place))
        return place

    def give_back(self, octets: int) -> None:
        """Ends a use of so many."""
        self._taken -= octets
        self._admit()

    def leave(self, octets: int, place: asyncio.Future[None]) -> None:
        """Ends a wait that was cancelled."""
        if place.done() and not place.cancelled():
            self.give_back(octets)
            return
        place.cancel()
        self._admit()

    def _fits(self, octets: int) -> bool:
        return not self._taken or self._taken + octets <= self._octets

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            octets, place = self._waiting.popleft()
            if not place.done():
                self._taken += octets
                place.set_result(None)
                now = self._loop.time()
                self._seconds_each += (min(now - self._given_at, LATEST_SECONDS) - self._seconds_each) / 8
                self._given_at = now

    def later(self) -> float:
        """In how many seconds one more may come back: at the rate at which memory was handed out lately."""
        now = self._loop.time()
        self._back_at = max(self._back_at + self._seconds_each, now + SOONEST_SECONDS)
        self._back_at = min(self._back_at, now + LATEST_SECONDS)
        return self._back_at - now


class Contents:
    """Reads content, as far as there is memory for it."""

    def __init__(
        self, store: LeaseStore, outage: StoreOutage, window: Window, *, octets: int, copies: int, prefetch: int
    ) -> None:
        """
        Args:
            window: Is woken when an email waits: others may take its place.
            octets: How much memory there is for content and what is made of it.
            copies: How many times its size an email's content takes.
            prefetch: How many emails the worker sends at once.
        """
        light = octets // LIGHT_SHARE
        self._store = store
        self._outage = outage
        self._window = window
        self._copies = copies
        most_waiting = max(1, prefetch // WAITING_SHARE)
        self._light = Memory(light, most_waiting=most_waiting)
        self._heavy = Memory(octets - light, most_waiting=most_waiting)
        # One of the worker's sessions at most: results and leases are written meanwhile.
        self._reading = asyncio.Lock()

    @asynccontextmanager
    async def held(self, email: InFlightEmail) -> AsyncIterator[str | None]:
        """Waits for memory, reads the email's content, and frees both in the end; gives why PostgreSQL cannot read it.

        Raises:
            NoMemory: too many wait already, or the host has less memory than the setting promises.
        """
        octets = email.lease.octets_apart
        if octets < 0:
            octets = await self._surely(lambda: self._find_octets(email.email_id))
        memory = self._light if octets <= LIGHT_OCTETS else self._heavy
        octets = octets * self._copies + OVERHEAD_OCTETS
        await self._take(email, memory, octets)
        fault = None
        try:
            try:
                email.content = await self._surely(lambda: self._store.read_content(email.email_id))
            except StatementRefused as error:
                fault = error.message
            except (MemoryError, AnswerTooLarge):
                # The host has less than the setting promises, which is no fault of the email.
                raise NoMemory(memory.later()) from None
            yield fault
        finally:
            email.content = None
            memory.give_back(octets)

    async def _take(self, email: InFlightEmail, memory: Memory, octets: int) -> None:
        place = memory.take(octets)
        if place is None:
            return
        email.on(Event.WAIT)
        self._window.wake()
        try:
            await place
        except asyncio.CancelledError:
            memory.leave(octets, place)
            raise
        email.on(Event.RESUME)

    async def _surely(self, read: Callable[[], Awaitable[T]]) -> T:
        """Reads again until PostgreSQL answers, however long it is away.

        Raises:
            AnswerTooLarge: this process has no memory for it.
            StatementRefused: PostgreSQL cannot read it.
        """
        while True:
            try:
                async with self._reading:
                    return await read()
            except AnswerTooLarge:
                raise
            except StoreUnavailable as error:
                await self._outage.wait(error)

    async def _find_octets(self, email_id: UUID) -> int:
        try:
            return await self._store.find_content_octets(email_id)
        except StatementRefused:
            return 0  # reading it says so, too
