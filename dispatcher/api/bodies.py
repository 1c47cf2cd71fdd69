"""Bodies: each bounded in octets and values, all bodies of a caller together, too, and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, TypeVar

from starlette.requests import Request

from dispatcher.api.access import Caller
from dispatcher.api.large_json import MOST_VALUES, count_values
from dispatcher.api.problems import Flaw, Problem
from dispatcher.api.shares import Shares

LARGE_BYTES: Final = 64 * 1024
"""From here on a body is parsed in a thread, so that others are answered meanwhile."""
LEAST_BYTES: Final = 16 * 1024
"""What a request is charged at least: it has a head, and a task that waits for the body."""
VALUE_BYTES: Final = 200
"""What a value needs, beside its text, once it is parsed and part of an email that waits to be stored."""

T = TypeVar("T")


class Bodies:
    """All bodies that are in memory."""

    def __init__(self, slots: Shares, memory: Shares, *, most_bytes: int) -> None:
        """
        Args:
            slots: Requests that are worked on.
            memory: Octets of bodies, and of what they become.
        """
        self._slots = slots
        self._memory = memory
        self._most_bytes = most_bytes

    def read(self, request: Request, caller: Caller) -> _Reading:
        """The body, within `async with`, for as long as it or what was made of it is needed.

        The request has a slot from when its body is there: a client that is slow to send it takes none.
        """
        return _Reading(self, request, caller.name)

    async def receive(self, reading: _Reading) -> bytearray:
        """Reads a request's body.

        Raises:
            Problem: it is no JSON by its type, too large, or too much is in memory or under way.
        """
        request = reading.request
        _check_type(request)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._most_bytes:
            raise self._too_large()
        body = bytearray()  # grows in place; joining pieces would hold the body in memory twice
        self._hold(reading, min(LEAST_BYTES, self._memory.most_each))
        async for chunk in request.stream():
            if len(body) + len(chunk) > self._most_bytes:
                raise self._too_large()
            body += chunk
            if len(body) > reading.held:
                self._hold(reading, len(body))
        length = len(body)
        if length >= LARGE_BYTES:
            # A smaller one is parsed before the loop turns to the next; what it becomes is never there twice.
            values = await off_loop(length, lambda: count_values(body))
            if values > MOST_VALUES:
                raise Problem("body-too-large", f"At most {MOST_VALUES} values are read: send fewer emails at once.")
            self._hold(reading, min(length + values * VALUE_BYTES, self._memory.most_each))
        self._slots.take(reading.name)
        reading.has_slot = True
        return body

    def _hold(self, reading: _Reading, octets: int) -> None:
        if octets > reading.held:
            self._memory.take(reading.name, octets - reading.held)
            reading.held = octets

    def forget(self, reading: _Reading) -> None:
        """The body is gone."""
        if reading.held:
            self._memory.give_back(reading.name, reading.held)
            reading.held = 0
        if reading.has_slot:
            self._slots.give_back(reading.name)
            reading.has_slot = False

    def _too_large(self) -> Problem:
        return Problem("body-too-large", f"At most {self._most_bytes} octets are read.", closes=True)


class _Reading:
    """One body, from its first octet to the answer."""

    __slots__ = ("_bodies", "has_slot", "held", "name", "request")

    def __init__(self, bodies: Bodies, request: Request, name: str) -> None:
        self._bodies = bodies
        self.request = request
        self.name = name
        self.held = 0
        self.has_slot = False

    async def __aenter__(self) -> bytearray:
        try:
            return await self._bodies.receive(self)
        except BaseException:
            self._bodies.forget(self)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bodies.forget(self)


def _check_type(request: Request) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if media_type.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise Problem("unsupported-media-type", closes=True)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        flaw = Flaw("header", "Content-Encoding", "is not taken: send the body as it is")
        raise Problem("unsupported-media-type", flaws=[flaw], closes=True)


_LARGE_WORK: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large bodies")
"""One thread: several would compete for the interpreter with the loop, and parse no faster."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What `work` returns; done in a thread where the body that it is about is large."""
    if size < LARGE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_LARGE_WORK, work)
