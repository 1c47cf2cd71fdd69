"""Reads large bodies and all attachments just before the email is sent. The lease statement does not read them.

Emails with such content share a memory budget. If an email does not fit into the free memory, it waits while other
emails are sent. Content of up to LIGHT_OCTETS has a separate share of the memory, so it never waits for large files. If
too many emails already wait, the worker releases the email, which becomes due again later. Waiting emails therefore
cannot fill the prefetch window.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from dispatcher.errors import AnswerTooLarge, StatementRefused, StoreUnavailable
from dispatcher.store.leases import LeaseStore
from dispatcher.worker.in_flight_email import EmailEvent, InFlightEmail
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.window import Window

T = TypeVar("T")

OVERHEAD_OCTETS: Final = 64 * 1024
"""The memory that an email needs in addition to its content."""
LIGHT_OCTETS: Final = 1024 * 1024
LIGHT_SHARE: Final = 4
"""A quarter (1 / LIGHT_SHARE) of the memory is reserved for content of at most LIGHT_OCTETS."""
WAITING_SHARE: Final = 8
"""The memory has two shares: one for light content, one for all other content. The emails that wait for one share may
fill at most an eighth (1 / WAITING_SHARE) of the prefetch window. The worker releases further emails."""
MIN_DELAY_SECONDS: Final = 2.0
"""The shortest time until a released email is due again."""
MAX_DELAY_SECONDS: Final = 60.0


class NoMemory(Exception):
    """Raised if an email gets no memory for its content: too many emails already wait for memory, or the host has too
    little."""

    def __init__(self, delay_seconds: float) -> None:
        super().__init__()
        self.delay_seconds = delay_seconds


class MemoryBudget:
    """Grants memory for emails, up to a limit in octets, in the order of the requests."""

    def __init__(self, octets: int, *, most_waiting: int) -> None:
        self._octets = octets
        self._most_waiting = most_waiting
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._given_at = 0.0
        self._seconds_each = MIN_DELAY_SECONDS
        self._back_at = 0.0

    def take(self, octets: int) -> asyncio.Future[None] | None:
        """Requests memory: None if granted at once, otherwise a future. A request for more than the whole budget is
        granted as soon as all memory is free. Raises NoMemory if too many requests already wait."""
        if not self._waiting and self._fits(octets):
            self._taken += octets
            return None
        if len(self._waiting) >= self._most_waiting:
            raise NoMemory(self.next_delay())
        grant = self._loop.create_future()
        self._waiting.append((octets, grant))
        return grant

    def give_back(self, octets: int) -> None:
        self._taken -= octets
        self._admit()

    def cancel(self, octets: int, grant: asyncio.Future[None]) -> None:
        """Cancels a request. If the request was already granted, returns its octets to the budget."""
        if grant.done() and not grant.cancelled():
            self.give_back(octets)
            return
        grant.cancel()
        self._admit()

    def _fits(self, octets: int) -> bool:
        return not self._taken or self._taken + octets <= self._octets

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            octets, grant = self._waiting.popleft()
            if not grant.done():
                self._taken += octets
                grant.set_result(None)
                now = self._loop.time()
                self._seconds_each += (min(now - self._given_at, MAX_DELAY_SECONDS) - self._seconds_each) / 8
                self._given_at = now

    def next_delay(self) -> float:
        """After how many seconds an email without memory should be due again: one email after another, as fast as
        requests were granted recently."""
        now = self._loop.time()
        self._back_at = max(self._back_at + self._seconds_each, now + MIN_DELAY_SECONDS)
        self._back_at = min(self._back_at, now + MAX_DELAY_SECONDS)
        return self._back_at - now


class ContentLoader:
    """Reads the large content of emails, within a memory budget."""

    def __init__(
        self, store: LeaseStore, outage: StoreOutage, window: Window, *, octets: int, copies: int, prefetch: int
    ) -> None:
        """`octets`: the most memory for content and its encoded copies. An email has `copies` of them."""
        light = octets // LIGHT_SHARE
        self._store = store
        self._outage = outage
        self._window = window
        self._copies = copies
        most_waiting = max(1, prefetch // WAITING_SHARE)
        self._light = MemoryBudget(light, most_waiting=most_waiting)
        self._heavy = MemoryBudget(octets - light, most_waiting=most_waiting)
        # Reads use one database connection at most, so that leases and results are not delayed.
        self._read_lock = asyncio.Lock()

    @asynccontextmanager
    async def loaded(self, email: InFlightEmail) -> AsyncIterator[str | None]:
        """Waits for memory, and loads the email's content; frees both on exit. Yields None, or the error if PostgreSQL
        cannot read the content. Raises NoMemory."""
        octets = email.lease.octets_apart
        if octets < 0:
            try:
                octets = await self._read_with_retries(lambda: self._store.find_content_octets(email.email_id))
            except StatementRefused:
                octets = 0  # the content is read below, which reports why that fails
        memory = self._light if octets <= LIGHT_OCTETS else self._heavy
        octets = octets * self._copies + OVERHEAD_OCTETS
        await self._take(email, memory, octets)
        fault = None
        try:
            try:
                email.content = await self._read_with_retries(lambda: self._store.read_content(email.email_id))
            except StatementRefused as error:
                fault = error.message
            except (MemoryError, AnswerTooLarge):
                # The host has less memory than DISPATCHER_WORKER_MEMORY_MB. The email is not at fault.
                raise NoMemory(memory.next_delay()) from None
            yield fault
        finally:
            email.content = None
            memory.give_back(octets)

    async def _take(self, email: InFlightEmail, memory: MemoryBudget, octets: int) -> None:
        grant = memory.take(octets)
        if grant is None:
            return
        email.on(EmailEvent.WAIT)
        self._window.wake()
        try:
            await grant
        except asyncio.CancelledError:
            memory.cancel(octets, grant)
            raise
        email.on(EmailEvent.RESUME)

    async def _read_with_retries(self, read: Callable[[], Awaitable[T]]) -> T:
        """Calls `read` until PostgreSQL answers. Raises AnswerTooLarge if this process has not enough memory."""
        while True:
            try:
                async with self._read_lock:
                    return await read()
            except AnswerTooLarge:
                raise
            except StoreUnavailable as error:
                await self._outage.wait(error)
