"""Reads JSON request bodies within limits: bytes and values per body, memory per caller, and memory in total."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from starlette.requests import Request

from dispatcher.admission.fair_limiter import FairLimiter
from dispatcher.admission.off_loop import LARGE_BYTES, run_off_loop
from dispatcher.admission.problems import FieldError, Problem
from dispatcher.api.large_json import MAX_VALUES, count_values

MIN_CHARGED_BYTES: Final = 16 * 1024
"""The least memory that counts for a request with a key: for its headers, and for the task that waits for its body."""
CHARGED_BYTES_PER_VALUE: Final = 200
"""How many bytes of memory a parsed JSON value needs, in addition to its text. The memory is in use until the value's
email is inserted."""


class BodyReader:
    """Reads the bodies of requests. Each body's memory and request slot count against the limits of its caller."""

    def __init__(self, slots: FairLimiter, memory: FairLimiter, *, max_bytes: int, for_providers: bool = False) -> None:
        """
        Args:
            slots: Limits the number of requests in progress.
            memory: Limits the bytes of bodies, and of the objects parsed from bodies.
            for_providers: Whether the bodies are those of providers, which need no API key. Any Content-Type is
                accepted: Amazon SNS posts JSON as text/plain. Values are counted only roughly: the exact count of a
                hostile body would take most of a second. Memory counts only from MIN_CHARGED_BYTES: otherwise,
                connections that send one byte each would use up a provider's memory. Nearly all genuine bodies are
                smaller, and need only a slot.
        """
        self._slots = slots
        self._memory = memory
        self._max_bytes = max_bytes
        self._for_providers = for_providers

    def read(self, request: Request, name: str, *, max_bytes: int | None = None) -> _BodyContext:
        """A context manager that reads the body. `name` is the caller's.

        The body's memory and a request slot count against the caller's limits until the block ends. A request
        gets its slot only after its whole body has arrived, so a slow client occupies no slot.
        """
        return _BodyContext(self, request, name, min(max_bytes or self._max_bytes, self._max_bytes))

    async def receive(self, context: _BodyContext) -> bytearray:
        """Reads a request's body. Raises `unsupported-media-type`, `body-too-large` or `overloaded`."""
        request = context.request
        _check_media_type(request, any_media_type=self._for_providers)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > context.max_bytes:
            raise _too_large(context.max_bytes)
        body = bytearray()  # grows in place: a list of chunks, joined at the end, would need twice the memory
        least = min(MIN_CHARGED_BYTES, self._memory.max_per_caller)
        if not self._for_providers:
            self._charge(context, least)
        async for chunk in request.stream():
            if len(body) + len(chunk) > context.max_bytes:
                raise _too_large(context.max_bytes)
            body += chunk
            if len(body) > least:
                self._charge(context, len(body))
        length = len(body)
        if length >= LARGE_BYTES:
            # Count and charge the values only of a large body. A smaller body is parsed without yielding to the event
            # loop, so only one such body is parsed at a time.
            values = await run_off_loop(length, lambda: count_values(body, exact=not self._for_providers))
            if values > MAX_VALUES:
                detail = f"The body has more than {MAX_VALUES:,} JSON values. Send fewer emails per request."
                raise Problem("body-too-large", detail)
            self._charge(context, min(length + values * CHARGED_BYTES_PER_VALUE, self._memory.max_per_caller))
        self._slots.acquire(context.name)
        context.has_slot = True
        return body

    def _charge(self, context: _BodyContext, size: int) -> None:
        if size > context.charged:
            self._memory.acquire(context.name, size - context.charged)
            context.charged = size

    def release(self, context: _BodyContext) -> None:
        """Releases the memory and the slot of a body."""
        if context.charged:
            self._memory.release(context.name, context.charged)
            context.charged = 0
        if context.has_slot:
            self._slots.release(context.name)
            context.has_slot = False


class _BodyContext:
    """The memory and the request slot of one request's body, from its first byte to the response."""

    __slots__ = ("_reader", "charged", "has_slot", "max_bytes", "name", "request")

    def __init__(self, reader: BodyReader, request: Request, name: str, max_bytes: int) -> None:
        self._reader = reader
        self.request = request
        self.name = name
        self.max_bytes = max_bytes
        self.charged = 0
        self.has_slot = False

    async def __aenter__(self) -> bytearray:
        try:
            return await self._reader.receive(self)
        except BaseException:
            self._reader.release(self)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.release(self)


def _too_large(max_bytes: int) -> Problem:
    return Problem("body-too-large", f"The limit is {max_bytes:,} bytes.", closes=True)


def _check_media_type(request: Request, *, any_media_type: bool) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    is_json = media_type.strip().lower() == "application/json" and charset in ("", "charset=utf-8")
    if not (is_json or any_media_type):
        error = FieldError("header", "Content-Type", "must be application/json; the charset may only be utf-8")
        raise Problem("unsupported-media-type", errors=[error], closes=True)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        error = FieldError("header", "Content-Encoding", "is not supported; send the body uncompressed")
        raise Problem("unsupported-media-type", errors=[error], closes=True)
