"""Collects what a client sends after DATA. Without I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dispatcher.admission.problems import Problem
from dispatcher.domain.raw_mime import MAX_LINE_OCTETS

_END: Final = b"\r\n.\r\n"
TOO_LARGE: Final = "552 5.3.4 The message is larger than {:,} bytes, the limit of this server. Send a smaller message."
LONG_LINE: Final = (
    f"554 5.6.0 A line of the message is longer than {MAX_LINE_OCTETS} bytes. Encode this part as base64 or "
    "quoted-printable."
)


class Content:
    """The content of one message. After a refusal, further content is discarded until its end."""

    def __init__(self, most_octets: int, charge: Callable[[int], None]) -> None:
        """`charge` is called with the additional octets of memory, and raises a problem if there are too many."""
        self._most_octets = most_octets
        self._charge = charge
        self._octets = bytearray(b"\r\n")  # as if a line had ended, so that an empty message ends
        self.refusal: str | Problem | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def feed(self, octets: bytes) -> bytes:
        """Takes octets, in which each CR and LF is part of a CRLF. Returns those after the end of the content."""
        searched = max(0, len(self._octets) - len(_END) + 1)
        self._octets += octets
        if (end := self._octets.find(_END, searched)) >= 0:
            rest = bytes(self._octets[end + len(_END) :])
            del self._octets[end + 2 :]
            self._check(len(octets) - len(rest))
            self.ended.set_result(None)
            return rest
        self._check(len(octets))
        if self.refusal is not None:
            del self._octets[: -len(_END) + 1]
        return b""

    def _check(self, more: int) -> None:
        if self.refusal is not None:
            return
        if len(self._octets) - 2 > self._most_octets:
            self.refusal = TOO_LARGE.format(self._most_octets)
            return
        try:
            self._charge(more)
        except Problem as problem:
            self.refusal = problem.without_traceback()

    def take(self) -> bytes:
        """The whole content, without the dots that SMTP adds. Releases the collected octets."""
        octets, self._octets = self._octets, bytearray()
        return bytes(memoryview(octets.replace(b"\r\n.", b"\r\n"))[2:])
