"""A local server that imitates SendGrid, SES, Resend and Twilio. It records accepted emails and delivers nothing.

    python -m dispatcher.dev.http_double --folder FOLDER [--port 0] [--tls] [--latency-ms 50] [--act close] [--wire]

The command prints one line of JSON with the server's URL and paths, and runs until SIGTERM. It writes to the folder:

    ledger.jsonl      every email that the server accepted (see `acceptance_ledger`)
    requests.jsonl    every request that the server read, and the result
    wire.jsonl        with `--wire`: events of each request and connection (see `HttpDouble.record_event`)
    ca.pem            with `--tls`: the certificate of the authority that signed the server's certificate

`PUT /double` changes the server's behaviour while it runs (see `http_behaviour.Behaviour.change`). `GET /double`
returns counts.
"""

from __future__ import annotations

import os
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from dispatcher.dev.acceptance_ledger import LedgerEntry
from dispatcher.dev.http_apis import Mail, Request
from dispatcher.dev.http_behaviour import Behaviour, Fault
from dispatcher.dev.http_session import HttpSession
from dispatcher.dev.recording_server import RecordingServer, appended, die_with_parent, parser_of, serve


class HttpDouble(RecordingServer[HttpSession]):
    """The local server that imitates the providers, and its records.

    Attributes:
        begun: The number of requests to send emails whose headers were read, by path.
        requests: How many completely read requests contained each email, by email id.
        received: The decoded bodies of the accepted requests; empty unless the argument `keeps` is True.
        answers: By idempotency key: the body and the answer of the request that was accepted with this key.
        messages: The SMS that were accepted last, in the form in which Twilio's API describes an SMS.
        reads: The number of requests to look up SMS at Twilio, by path.
    """

    def __init__(
        self,
        folder: Path,
        behaviour: Behaviour | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        keeps: bool = False,
        records_wire: bool = False,
    ) -> None:
        super().__init__(folder, records_wire=records_wire)
        self.behaviour = behaviour or Behaviour()
        self.begun: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.received: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[bytes, bytes]] = {}
        self.messages: deque[dict[str, Any]] = deque(maxlen=1000)
        self.reads: Counter[str] = Counter()
        self._accepted = 0
        self._tls = tls
        self._keeps = keeps
        self._log = -1

    @property
    def requests_path(self) -> Path:
        return self._folder / "requests.jsonl"

    @property
    def url(self) -> str:
        """The value for DISPATCHER_SENDGRID_HOST, DISPATCHER_RESEND_URL and the URLs of SES and Twilio."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Listens on the loopback interface; port 0 chooses a free port."""
        await self._start(port, self._tls)
        self._log = appended(self.requests_path)

    async def close(self) -> None:
        """Stops listening and closes every session. Idempotent."""
        await super().close()
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def accept(self, request: Request, mails: Sequence[Mail]) -> None:
        """Writes the accepted emails of a request to the ledger, before the answer is sent."""
        self._accepted += len(mails)
        if self._keeps:
            self.received.append(request.document)
        assert self._ledger is not None
        # A bulk call has one size, which is divided equally among its emails.
        octets, at = request.octets // max(1, len(mails)), time.time()
        entries = (
            # An address without "@" is a phone number. With it, readers of the ledger know an SMS.
            LedgerEntry(mail.email_id, len(mail.addresses), octets, at, [to for to in mail.addresses if "@" not in to])
            for mail in mails
        )
        self._ledger.append(*entries)

    def record_request(self, request: Request, came: str) -> None:
        """Writes one line to requests.jsonl for each email of a completely read request, with its result: `accepted`,
        `repeated`, the name of a fault, or the HTTP status of a refusal."""
        at = time.time()
        lines = []
        for mail in request.mails:
            self.requests[mail.email_id] += 1
            line = {"email_id": mail.email_id, "came": came, "at": at, "together": len(request.mails)}
            lines.append(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        os.write(self._log, b"".join(lines))

    def record_event(self, connection: int, event: str, **fields: object) -> None:
        """Writes an event of a connection to wire.jsonl, if `records_wire`.

        `began`: the request's headers were read. `read`: the whole request was read (`email_id`, or `email_ids` of a
        bulk call). `answered`: the kernel took the whole answer while the connection was open. `ended`: the connection
        was closed, `by_us` or `by_reset`.
        """
        if self._wire >= 0:
            self._write_event(connection, event, fields)

    def counts(self) -> dict[str, object]:
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


@asynccontextmanager
async def running_double(
    folder: Path, behaviour: Behaviour | None = None, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[HttpDouble]:
    """Runs the local server on this event loop, for tests. The server keeps the accepted requests in memory."""
    double = HttpDouble(folder, behaviour, tls=tls, keeps=True)
    await double.start()
    try:
        yield double
    finally:
        await double.close()


def throwaway_tls(ca_file: Path) -> ssl.SSLContext:
    """A TLS context for a server on the loopback interface. Writes the certificate of the new authority, which clients
    must trust, to a file."""
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(ca_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context


async def _serve(double: HttpDouble, port: int, more: dict[str, object]) -> None:
    await double.start(port)
    await serve(double, {"url": double.url, "port": double.port, "ledger": str(double.ledger_path), **more})


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the server until SIGTERM or SIGINT."""
    parser = parser_of("http_double", "A local SendGrid, SES, Resend and Twilio.")
    parser.add_argument("--tls", action="store_true", help="use HTTPS, with a certificate of a new authority")
    parser.add_argument("--act", type=Fault, choices=list(Fault), help="the fault that each request gets")
    parser.add_argument("--times", type=int, help="how many requests get the fault; default: all")
    parser.add_argument("--throttle-seconds", type=float, default=0.0, help="answer 429 for this long; default: 0")
    parser.add_argument("--key", help="the API key that requests to SendGrid, Resend and Twilio need; default: any")
    options = parser.parse_args(arguments)
    if options.die_with_parent:
        die_with_parent()
    behaviour = Behaviour(options.act, options.times, latency_seconds=options.latency_ms / 1000, key=options.key)
    behaviour.throttle(options.throttle_seconds)
    options.folder.mkdir(parents=True, exist_ok=True)
    ca_file = options.folder / "ca.pem"
    tls = throwaway_tls(ca_file) if options.tls else None
    import uvloop

    more: dict[str, object] = {"ca_file": str(ca_file)} if tls else {}
    uvloop.run(_serve(HttpDouble(options.folder, behaviour, tls=tls, records_wire=options.wire), options.port, more))


if __name__ == "__main__":
    main()
