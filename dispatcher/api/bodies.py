"""Bodies: each bounded in octets and values, all bodies of a caller together, too, and JSON."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, TypeVar

import orjson
from starlette.requests import Request

from dispatcher.api.access import Caller
from dispatcher.api.problems import Flaw, Problem
from dispatcher.api.shares import Shares
from dispatcher.domain.email_rules import MAX_BODY_OCTETS
from dispatcher.domain.json_names import has_name_twice

LARGE_BYTES: Final = 64 * 1024
"""From here on a body is parsed in a thread, so that others are answered meanwhile."""
LEAST_BYTES: Final = 16 * 1024
"""What a request is charged at least: it has a head, and a task that waits for the body."""
MOST_VALUES: Final = 400_000
"""Objects, lists, and what is in them. A thousand emails have a tenth of it, unless all have many recipients."""
VALUE_BYTES: Final = 100
"""What a value needs once it is parsed, at most, beside its text: three octets of JSON become an object of 64."""

MOST_WIDE_CHARACTERS: Final = MAX_BODY_OCTETS + (1 << 20)
"""The most characters in strings that are not pure ASCII: each may take four octets once parsed. No email has more."""

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
            if length > MAX_BODY_OCTETS and await off_loop(length, lambda: count_wide(body)) > MOST_WIDE_CHARACTERS:
                raise Problem("body-too-large", f"At most {MOST_WIDE_CHARACTERS} characters of text are read.")
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


_AT_ONCE: Final = 256 * 1024
"""Octets that are looked at in one go: what C does of a text, nobody interrupts."""
_WITHIN: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
"""What stands in a text. It never backtracks, however hostile it is."""
_BEYOND_ASCII: Final = re.compile(rb"[\x80-\xff]")


def count_values(body: bytes | bytearray) -> int:
    """How many values a JSON text has, at most; exactly where that seems to be more than MOST_VALUES."""
    count = _count_marks(body, 0, len(body))
    if count <= MOST_VALUES:
        return count
    count = texts = end = 0
    while count <= MOST_VALUES and texts <= MOST_VALUES + 1:
        start = body.find(b'"', end)
        if start < 0:
            return count + _count_marks(body, end, len(body))
        count += _count_marks(body, end, start)
        texts, end = texts + 1, _end_of_text(body, start)  # it may have these characters in it
    return MOST_VALUES + 1


def count_wide(body: bytes | bytearray) -> int:
    """How many characters stand in texts with characters beyond ASCII, at most."""
    if body.isascii() and rb"\u" not in body:
        return 0
    count = 0
    start = body.find(b'"')
    while start >= 0:
        end = _end_of_text(body, start)
        escapes = body.count(rb"\u", start, end)
        if escapes or _has_beyond_ascii(body, start, end):
            count += end - start - 5 * (escapes - body.count(rb"\\u", start, end))  # an escaped backslash is none
        start = body.find(b'"', end)
    return count


def _end_of_text(body: bytes | bytearray, start: int) -> int:
    """Where the text ends whose quote stands at the start, or the body."""
    end = start + 1
    while match := _WITHIN.match(body, end, end + _AT_ONCE):
        if match.end() == end:
            break
        end = match.end()
    return min(end + 1, len(body))


def _has_beyond_ascii(body: bytes | bytearray, start: int, end: int) -> bool:
    windows = range(start, end, _AT_ONCE)
    return any(_BEYOND_ASCII.search(body, begin, min(end, begin + _AT_ONCE)) for begin in windows)


def _count_marks(body: bytes | bytearray, start: int, end: int) -> int:
    count = 0
    for begin in range(start, end, _AT_ONCE):
        until = min(end, begin + _AT_ONCE)
        count += sum(body.count(mark, begin, until) for mark in b"{[,:")
        if count > MOST_VALUES:
            break
    return count


def decoded(body: bytes | bytearray) -> Any:
    """The JSON value that a body is.

    Raises:
        Problem: it is none, nested deeper than any email is, or has a name twice in one object.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # Its message quotes nothing of the text.
        raise Problem(
            "malformed-json", f"{error.msg.capitalize()} (line {error.lineno}, column {error.colno})."
        ) from None
    if has_name_twice(body, value):
        # Whoever looked at it before us may have taken the other one.
        raise Problem("malformed-json", "An object has the same name twice.")
    return value


_LARGE_WORK: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large bodies")
"""One thread: several would compete for the interpreter with the loop, and parse no faster."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What `work` returns; done in a thread where the body that it is about is large."""
    if size < LARGE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_LARGE_WORK, work)
