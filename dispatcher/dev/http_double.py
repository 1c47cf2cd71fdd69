"""A local HTTPS server that stands for SendGrid and SES, with a ledger of what it accepted. It delivers nothing.

    python -m dispatcher.dev.http_double --folder FOLDER [--port 0] [--tls] [--latency-ms 50] [--act close] [--wire]

prints one line of JSON with its URL and paths, and runs until SIGTERM. In the folder: `ledger.jsonl` (see `ledger`),
with every email that it accepted; `requests.jsonl`, with every request that it read, and what came of it; with
`--wire`, `wire.jsonl`, with what was seen of each request and connection (see `HttpDouble.witness`); with `--tls`,
`ca.pem`. `PUT /double` changes its behaviour while it runs (see `http_behaviour.Behaviour.change`), `GET /double` tells
its counts.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import orjson

from dispatcher.dev.acceptance_ledger import AcceptanceLedger, LedgerEntry, LedgerWriter, read_ledger
from dispatcher.dev.http_apis import Mail, Request
from dispatcher.dev.http_behaviour import Behaviour, Fault
from dispatcher.dev.http_session import HttpSession

PR_SET_PDEATHSIG: Final = 1


class HttpDouble:
    """The server and its books.

    Attributes:
        behaviour: What it does besides accepting; may be changed while it runs.
        sessions: Open connections.
        connections: How many there ever were.
        begun: Requests to send whose headers were read, by path.
        requests: Requests to send that were read to their end, by email id: who posts twice shows here.
        received: The bodies of the accepted ones, if it was told to keep them.
    """

    def __init__(
        self,
        folder: Path,
        behaviour: Behaviour | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        keeps: bool = False,
        watches_wire: bool = False,
    ) -> None:
        self.behaviour = behaviour or Behaviour()
        self.sessions: set[HttpSession] = set()
        self.connections = 0
        self.begun: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.received: list[dict[str, Any]] = []
        self._accepted = 0
        self._folder = folder
        self._tls = tls
        self._keeps = keeps
        self._ledger: LedgerWriter | None = None
        self._watches_wire = watches_wire
        self._log = -1
        self._wire = -1
        self._server: asyncio.Server | None = None

    @property
    def ledger_path(self) -> Path:
        """Where the ledger is."""
        return self._folder / "ledger.jsonl"

    @property
    def requests_path(self) -> Path:
        """Where the requests are."""
        return self._folder / "requests.jsonl"

    @property
    def wire_path(self) -> Path:
        """Where the wire's events are."""
        return self._folder / "wire.jsonl"

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None, "the double has not been started"
        port = self._server.sockets[0].getsockname()[1]
        assert isinstance(port, int)
        return port

    @property
    def url(self) -> str:
        """What DISPATCHER_SENDGRID_HOST or DISPATCHER_SES_ENDPOINT_URL should say."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def ledger(self) -> AcceptanceLedger:
        """What it accepted so far."""
        return read_ledger(self.ledger_path)

    async def start(self, port: int = 0) -> None:
        """Listen on the loopback; 0 finds a free port."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ledger = LedgerWriter(self.ledger_path)
        self._log = _appended(self.requests_path)
        if self._watches_wire:
            self._wire = _appended(self.wire_path)
        self._server = await asyncio.get_running_loop().create_server(
            self._new_session, "127.0.0.1", port, ssl=self._tls, backlog=1024
        )

    async def close(self) -> None:
        """Stop listening and end every session. Again is harmless."""
        if self._server is not None:
            self._server.close()
            self.drop_connections()
            await self._server.wait_closed()
            self._server = None
        if self._ledger is not None:
            self._ledger.close()
            os.close(self._log)
            self._ledger = None
        if self._wire >= 0:
            os.close(self._wire)
            self._wire = -1

    def drop_connections(self) -> None:
        """End every open connection without a word, as a restarted server does."""
        for session in tuple(self.sessions):
            session.drop()

    def accept(self, request: Request, mails: Sequence[Mail]) -> None:
        """Enter the accepted emails of a request into the ledger."""
        self._accepted += len(mails)
        if self._keeps:
            self.received.append(request.document)
        assert self._ledger is not None
        # Of a request that several share, each has its part of the octets.
        octets, at = request.octets // max(1, len(mails)), time.time()
        self._ledger.append(*(LedgerEntry(mail.email_id, len(mail.addresses), octets, at) for mail in mails))

    def note(self, request: Request, came: str) -> None:
        """Enter a request that was read to its end, and what comes of it: a line for each of its emails."""
        at = time.time()
        lines = []
        for mail in request.mails:
            self.requests[mail.email_id] += 1
            line = {"email_id": mail.email_id, "came": came, "at": at, "together": len(request.mails)}
            lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        os.write(self._log, b"".join(lines))

    def witness(self, connection: int, event: str, **fields: object) -> None:
        """Enter what is seen on the wire: a request `began` (its headers are read), was `read` (`email_id`, and
        `email_ids` where several share it), was `answered` (the kernel took the whole answer while the connection
        stood), and that a connection `ended` (`by_us`, `by_reset`).
        """
        if self._wire >= 0:
            line = {"connection": connection, "event": event, "at": time.time(), **fields}
            os.write(self._wire, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def told(self) -> dict[str, object]:
        """The counts, as `GET /double` tells them."""
        return {
            "begun": sum(self.begun.values()),
            "requests": self.requests.total(),
            "repeated": self.requests.total() - len(self.requests),
            "accepted": self._accepted,
            "connections": self.connections,
        }

    def _new_session(self) -> HttpSession:
        self.connections += 1
        return HttpSession(self, self.connections)


def _appended(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


@asynccontextmanager
async def running_double(
    folder: Path, behaviour: Behaviour | None = None, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpDouble]:
    """A double on this loop, for tests; keeps what it receives in memory."""
    double = HttpDouble(folder, behaviour, tls=tls, keeps=True)
    await double.start()
    try:
        yield double
    finally:
        await double.close()


def throwaway_tls(ca_file: Path) -> ssl.SSLContext:
    """The server's side of TLS for the loopback, by an authority that is made now and forgotten; `ca_file` gets its
    certificate, for whoever is to trust it.
    """
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(ca_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context


async def _serve(double: HttpDouble, port: int, told: dict[str, str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await double.start(port)
    where = {"url": double.url, "port": double.port, "ledger": str(double.ledger_path), **told}
    sys.stdout.buffer.write(orjson.dumps(where, option=orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()
    await stop.wait()
    await double.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; returns after SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser("python -m dispatcher.dev.http_double", description="A local SendGrid and SES.")
    parser.add_argument("--folder", type=Path, required=True, help="for the ledger and the certificate")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) finds a free one")
    parser.add_argument("--tls", action="store_true", help="HTTPS, by an authority of its own")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before an answer")
    parser.add_argument("--act", type=Fault, choices=list(Fault), help="do this to each request")
    parser.add_argument("--times", type=int, help="how many requests meet the act; default: all")
    parser.add_argument("--throttle-seconds", type=float, default=0.0, help="answer 429 for so long")
    parser.add_argument("--key", help="the API key that SendGrid's requests need; default: any")
    parser.add_argument("--wire", action="store_true", help="keep a record of every request and connection")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started us does")
    options = parser.parse_args(arguments)
    if options.die_with_parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    behaviour = Behaviour(options.act, options.times, latency_seconds=options.latency_ms / 1000, key=options.key)
    behaviour.throttle(options.throttle_seconds)
    options.folder.mkdir(parents=True, exist_ok=True)
    ca_file = options.folder / "ca.pem"
    tls = throwaway_tls(ca_file) if options.tls else None
    import uvloop

    told = {"ca_file": str(ca_file)} if tls else {}
    uvloop.run(_serve(HttpDouble(options.folder, behaviour, tls=tls, watches_wire=options.wire), options.port, told))


if __name__ == "__main__":
    main()
