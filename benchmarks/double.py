"""A lean local SendGrid and SES for benchmarks: HTTPS with persistent connections, and a ledger of accepted emails.

    python -m benchmarks.double --folder FOLDER [--tls] [--latency-ms 50] [--port 0]

The double prints one line of JSON with its URL and paths, and runs until SIGTERM. It accepts every email and, unlike
`dispatcher.dev.http_double`, injects no faults. It uses as little CPU as Python allows, so that the benchmark does not
measure the double. The folder contains `ca.pem`, and `ledger.txt` with one line per accepted email, in order of
acceptance: `<email id> <unix seconds>`. Lines stay in memory for up to a tenth of a second, so killing this process may
lose some.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import re
import signal
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/double.py`

from dispatcher.dev.http_double import throwaway_tls
from dispatcher.transport.tls import Tls

PR_SET_PDEATHSIG: Final = 1
WRITE_SECONDS: Final = 0.1
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_SENDGRID_ID: Final = re.compile(rb'"email_id": ?"([^"]+)"')
_SES_ID: Final = re.compile(rb'"Name": ?"email_id", ?"Value": ?"([^"]+)"')
_RESEND_ID: Final = re.compile(rb"\r\n[Ii]dempotency-[Kk]ey: ([0-9a-f-]{36})\r\n")
_NOT_FOUND: Final = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_NO_LENGTH: Final = b"HTTP/1.1 411 Length Required\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_NO_ID: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


class Books:
    """The accepted emails with their times, written to a file in batches."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lines: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def accept(self, email_ids: Sequence[bytes]) -> None:
        """Add the emails of one request."""
        if not self._lines:
            self._loop.call_later(WRITE_SECONDS, self.write)
        instant = b" %.6f\n" % time.time()
        for email_id in email_ids:
            self._lines.append(email_id + instant)

    def write(self) -> None:
        """Write all pending lines."""
        if self._lines:
            self._file.write(b"".join(self._lines))
            self._lines.clear()


class Session(asyncio.Protocol):
    """One connection."""

    def __init__(self, books: Books, latency_seconds: float) -> None:
        self._books = books
        self._latency_seconds = latency_seconds
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()  # an email of 20 MiB arrives in hundreds of pieces

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. Called by asyncio after the TLS handshake."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer every request that is complete. Called by asyncio."""
        self._data += data
        while (head_end := self._data.find(_HEAD_END)) >= 0:
            body_at = head_end + len(_HEAD_END)
            octets = self._body_octets(body_at)
            if len(self._data) < body_at + octets:
                return
            self._answer(bytes(self._data[:body_at]), bytes(self._data[body_at : body_at + octets]))
            del self._data[: body_at + octets]

    def _body_octets(self, body_at: int) -> int:
        if length := _LENGTH.search(self._data, 0, body_at):
            return int(length[1])
        if not self._data.startswith(b"GET "):
            self._transport.write(_NO_LENGTH)
            self._transport.close()
        return 0

    def _answer(self, head: bytes, body: bytes) -> None:
        reply = self._reply(head, body)
        if self._latency_seconds:
            self._loop.call_later(self._latency_seconds, self._transport.write, reply)
        else:
            self._transport.write(reply)

    def _reply(self, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"POST /v3/mail/send "):
            if not (email_ids := _SENDGRID_ID.findall(body)):
                return _NO_ID
            self._books.accept(email_ids)
            return _accepted_by_sendgrid(email_ids[0])
        if head.startswith((b"POST /v2/email/outbound-emails ", b"POST /v2/email/outbound-bulk-emails ")):
            if not (email_ids := _SES_ID.findall(body)):
                return _NO_ID
            self._books.accept(email_ids)
            return _accepted_by_ses(email_ids, is_bulk=head.startswith(b"POST /v2/email/outbound-bulk"))
        if head.startswith(b"POST /emails "):
            if not (found := _RESEND_ID.search(head)):
                return _NO_ID
            self._books.accept([found[1]])
            return _json(b'{"id":"%b"}' % found[1])
        return _NOT_FOUND


def _accepted_by_sendgrid(email_id: bytes) -> bytes:
    return b"HTTP/1.1 202 Accepted\r\nServer: nginx\r\nX-Message-Id: %b\r\nContent-Length: 0\r\n\r\n" % email_id


def _accepted_by_ses(email_ids: Sequence[bytes], *, is_bulk: bool) -> bytes:
    if is_bulk:
        results = b",".join(b'{"Status":"SUCCESS","MessageId":"0100%b"}' % email_id for email_id in email_ids)
        body = b'{"BulkEmailEntryResults":[%b]}' % results
    else:
        body = b'{"MessageId":"0100%b"}' % email_ids[0]
    return _json(body)


def _json(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


async def serve(folder: Path, port: int, tls: ssl.SSLContext | None, latency_seconds: float) -> None:
    """Listen on the loopback interface until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    books = Books(folder / "ledger.txt")

    def session() -> asyncio.Protocol:
        above = Session(books, latency_seconds)
        return above if tls is None else Tls(tls, above)

    server = await loop.create_server(session, "127.0.0.1", port, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    ready = {
        "url": f"{'https' if tls else 'http'}://127.0.0.1:{port}",
        "port": port,
        "ledger": str(folder / "ledger.txt"),
        "ca_file": str(folder / "ca.pem") if tls else None,
    }
    print(json.dumps(ready), flush=True)
    await stop.wait()
    server.close()
    books.write()


def read_acceptances(path: Path) -> dict[str, list[float]]:
    """The times of acceptance by email id, in Unix seconds; an email with two times was accepted twice."""
    acceptances: dict[str, list[float]] = {}
    *lines, _unfinished = path.read_text().split("\n") if path.exists() else [""]
    for line in lines:
        email_id, _, instant = line.partition(" ")
        acceptances.setdefault(email_id, []).append(float(instant))
    return acceptances


def main() -> None:
    """The command line; returns after SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="benchmarks/double.py", description="A lean local SendGrid and SES.")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the ledger and the certificate")
    parser.add_argument("--port", type=int, default=0, help="port; 0 (the default) selects a free port")
    parser.add_argument("--tls", action="store_true", help="use HTTPS with a generated authority (ca.pem)")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="delay before each response; default: 0")
    parser.add_argument("--die-with-parent", action="store_true", help="exit when the parent process exits")
    options = parser.parse_args()
    if options.die_with_parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    options.folder.mkdir(parents=True, exist_ok=True)
    tls = throwaway_tls(options.folder / "ca.pem") if options.tls else None
    uvloop.run(serve(options.folder, options.port, tls, options.latency_ms / 1000))


if __name__ == "__main__":
    main()
