"""Bodies: read up to a bound, all bodies together up to another, and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, TypeVar

import orjson
from starlette.requests import Request

from dispatcher.api.problems import Flaw, Problem
from dispatcher.domain.json_names import has_name_twice

LARGE_BYTES: Final = 256 * 1024
"""From here on a body is parsed in a thread, so that others are answered meanwhile."""

T = TypeVar("T")


class Bodies:
    """All bodies that are in memory."""

    def __init__(self, *, most_bytes: int, most_bytes_together: int) -> None:
        self._most_bytes = most_bytes
        self._most_together = max(most_bytes, most_bytes_together)
        self._held = 0

    def read(self, request: Request) -> _Reading:
        """The body, within `async with`, for as long as it or what was made of it is needed."""
        return _Reading(self, request)

    async def receive(self, reading: _Reading) -> bytes:
        """Reads a request's body.

        Raises:
            Problem: it is no JSON by its type, too large, or too much is in memory.
        """
        request = reading.request
        _check_type(request)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._most_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        async for chunk in request.stream():
            reading.held += len(chunk)
            self._held += len(chunk)
            if reading.held > self._most_bytes:
                raise self._too_large()
            if self._held > self._most_together:
                raise Problem("overloaded", "Large bodies are being read.", retry_after=1, closes=True)
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def forget(self, reading: _Reading) -> None:
        """The body is gone."""
        self._held -= reading.held
        reading.held = 0

    def _too_large(self) -> Problem:
        return Problem("body-too-large", f"At most {self._most_bytes} octets are read.", closes=True)


class _Reading:
    """One body, from its first octet to the answer."""

    __slots__ = ("_bodies", "held", "request")

    def __init__(self, bodies: Bodies, request: Request) -> None:
        self._bodies = bodies
        self.request = request
        self.held = 0

    async def __aenter__(self) -> bytes:
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


def decoded(body: bytes) -> Any:
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


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What `work` returns; done in a thread where the body that it is about is large."""
    return await asyncio.to_thread(work) if size >= LARGE_BYTES else work()
