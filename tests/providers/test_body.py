"""Bodies with attachments are encoded while they are written, without blocking the event loop."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from base64 import b64encode, encodebytes
from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from dispatcher.transport.body import PIECE_OCTETS, Base64Content, Body
from dispatcher.transport.http_connection import HttpConnection
from dispatcher.transport.smtp_protocol import SmtpProtocol

MEBIBYTE = 1024 * 1024
MEASURE: Final = """
import tracemalloc
from datetime import UTC, datetime
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.providers.sendgrid.request import body_of
from dispatcher.transport.mime import render
from dispatcher.transport.smtp_transaction import dot_stuffed

bodies = body_of, lambda email: dot_stuffed(render(email).body)
film = OutgoingAttachment("film.mp4", "video/mp4", bytes(5 << 20))
plain = {"sender": "a@example.com", "to": ("b@example.com",), "subject": "Film", "text": "Look"}
email = OutgoingEmail(new_email_id(), datetime.now(UTC), **plain, attachments=(film,))
tracemalloc.start()
for body in bodies:
    tracemalloc.reset_peak()
    print(sum(map(len, body(email).pieces())), tracemalloc.get_traced_memory()[1])
"""
"""Prints the length of SendGrid's and of the MIME body with a large attachment, and the most memory that it took."""


@pytest.mark.parametrize("octets", [0, 1, 2, 3, 56, 57, 58, 43_775, 43_776, 43_777, 200_000])
def test_base64_in_pieces_equals_the_standard_librarys(octets: int) -> None:
    content = bytes(range(256)) * (octets // 256) + bytes(octets % 256)
    plain, lined = Body((b"{", Base64Content(content), b"}")), Body((Base64Content(content, has_lines=True),))

    assert bytes(plain) == b"".join(plain.pieces()) == b"{" + b64encode(content) + b"}"
    assert bytes(lined) == b"".join(lined.pieces()) == encodebytes(content).replace(b"\n", b"\r\n")
    for body in (plain, lined, Body((content,))):
        assert len(body) == len(bytes(body))
        assert max(map(len, body.pieces()), default=0) <= PIECE_OCTETS


def test_a_large_attachment_is_in_memory_once() -> None:
    # tracemalloc counts what every thread of a process allocates, and threads of earlier tests may still work. So
    # measure in a process without other threads.
    ran = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, timeout=60, text=True)

    for line in ran.stdout.splitlines():
        octets, most = map(int, line.split())
        assert octets > 6 * MEBIBYTE
        assert most < MEBIBYTE
    assert len(ran.stdout.splitlines()) == 2


class ReadsAtOnce(asyncio.Transport):
    """A transport to a server that reads as fast as we write. Counts the loop iterations between two writes."""

    def __init__(self, local: socket.socket) -> None:
        super().__init__({"socket": local})
        self.turns = 0
        self.turns_at_writes: list[int] = []
        self._count()

    def _count(self) -> None:
        self.turns += 1
        self._next = asyncio.get_running_loop().call_soon(self._count)

    def is_closing(self) -> bool:
        return False

    def write(self, data: object) -> None:
        if data:
            self.turns_at_writes.append(self.turns)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self._next.cancel()


async def over_http(transport: ReadsAtOnce, pieces: list[bytes]) -> None:
    connection = HttpConnection(lambda _: None)
    connection.connection_made(transport)
    connection.is_busy = True
    await connection.write_pieces(pieces)


async def over_smtp(transport: ReadsAtOnce, pieces: list[bytes]) -> None:
    protocol = SmtpProtocol()
    protocol.connection_made(transport)
    for piece in pieces:
        protocol.write(piece, 0)
        await protocol.flush()


@pytest.mark.parametrize("send", [over_http, over_smtp])
async def test_the_loop_runs_other_tasks_between_pieces_even_if_the_server_reads_fast(
    send: Callable[[ReadsAtOnce, list[bytes]], Awaitable[object]],
) -> None:
    local, remote = socket.socketpair()
    with local, remote:
        transport = ReadsAtOnce(local)

        await send(transport, [bytes(8)] * 16)

        transport.abort()
        assert len(set(transport.turns_at_writes)) == 16
