"""The server's half of one HTTP/1.1 connection, with a script of misdeeds. See `http_double`.

httptools parses; an asyncio protocol does the rest. A web framework answers neatly, and neat is what this must not be.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import httptools
import orjson

from dispatcher.dev.http_apis import APIS, SENDGRID, Api, Mail, Request
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply, answer, octets_of

DRIP_SECONDS: Final = 0.02
FLOOD_OCTETS: Final = 64 * 1024 * 1024
_CHUNK: Final = bytes(64 * 1024)
_NONSENSE: Final = (ValueError, LookupError, TypeError, AttributeError)
"""What reading a document raises that is not of the expected form."""
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
_PAGE: Final = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>ann@example.com, sign in</body></html>"


SES_ACCOUNT: Final = {
    "SendingEnabled": True,
    "ProductionAccessEnabled": True,
    "SendQuota": {"Max24HourSend": 50_000.0, "MaxSendRate": 1_000.0, "SentLast24Hours": 0.0},
}
"""What `dispatcher doctor` asks SES for."""


class HttpBooks(Protocol):
    """Where a session enters what it accepts, and what all sessions share."""

    behaviour: Behaviour
    sessions: set[HttpSession]
    begun: Counter[str]

    def accept(self, request: Request, mails: Sequence[Mail]) -> None:
        """Enter the accepted emails of a request, before the answer goes out."""
        ...

    def note(self, request: Request, came: str) -> None:
        """Enter a request that was read to its end, whatever comes of it."""
        ...

    def witness(self, connection: int, event: str, **fields: object) -> None:
        """Enter what is seen on the wire, if the wire is watched."""
        ...

    def told(self) -> dict[str, object]:
        """The counts, for who asks over HTTP."""
        ...


class HttpSession(asyncio.Protocol):
    """One connection."""

    def __init__(self, books: HttpBooks, number: int) -> None:
        self._books = books
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._act: Fault | Reply | None = None
        self._closes = False
        self._begin()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the session (asyncio calls this, once TLS stands)."""
        self._transport = cast(asyncio.Transport, transport)
        self._books.sessions.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the session (asyncio calls this)."""
        self._books.sessions.discard(self)
        self._books.witness(self._number, "ended", by_us=self._closes, by_reset=exc is not None)

    def data_received(self, data: bytes) -> None:
        """Obey (asyncio calls this)."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def drop(self) -> None:
        """End the connection without a word."""
        self._closes = True
        self._transport.abort()

    def on_url(self, url: bytes) -> None:
        """Part of the request's target (httptools calls this and what follows)."""
        self._path += url.decode("ascii", "replace")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if name.lower() == b"authorization":
            self._authorization = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The headers are read: time for those who do not read the rest."""
        self._method = self._parser.get_method().decode("ascii")
        self._api: Api | None = APIS.get(self._path) if self._method == "POST" else None
        if self._api is None:
            return
        self._books.begun[self._path] += 1
        self._books.witness(self._number, "began")
        self._act = self._books.behaviour.next_fault()
        if self._act is Fault.CLOSE_UNREAD or self._act is Fault.RESET_UNREAD:
            self._end(by_reset=self._act is Fault.RESET_UNREAD)

    def on_body(self, body: bytes) -> None:
        """Part of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """The whole request is read."""
        if not self._transport.is_closing():
            self._answer()
        self._begin()

    def _begin(self) -> None:
        """Back to where a request may begin."""
        self._path = self._method = self._authorization = ""
        self._body = bytearray()

    def _answer(self) -> None:
        behaviour = self._books.behaviour
        if self._api is None:
            self._send(self._administer())
        elif behaviour.key is not None and self._authorization != f"Bearer {behaviour.key}":
            self._send(octets_of(self._api.unauthorized()))
        else:
            self._judge(self._api, behaviour)

    def _judge(self, api: Api, behaviour: Behaviour) -> None:
        try:
            request = api.read(orjson.loads(self._body), len(self._body))
        except _NONSENSE:
            self._send(octets_of(api.malformed()))
            return
        self._witness_read(request)
        if behaviour.throttled_until and time.time() < behaviour.throttled_until:
            self._books.note(request, "429")
            self._later(octets_of(api.throttled(behaviour.throttled_until)))
        elif isinstance(self._act, Reply):
            self._books.note(request, str(self._act.status))
            self._later(octets_of(self._act))
        elif refusal := api.refused(request, behaviour.culprits, names=behaviour.names_culprits):
            self._books.note(request, str(refusal.status))
            self._later(octets_of(refusal))
        elif self._act is Fault.FORGET:
            self._books.note(request, self._act)
            self._end(by_reset=False)
        else:
            self._books.note(request, self._act or "accepted")
            self._books.accept(request, api.taken(request, behaviour.culprits))
            octets = api.accepted(request, behaviour.culprits)
            if self._act is None:
                self._later(octets)
            else:
                self._misbehave(self._act, octets)

    def _witness_read(self, request: Request) -> None:
        ids = [mail.email_id for mail in request.mails]
        together = {"email_ids": ids} if len(ids) > 1 else {}
        self._books.witness(self._number, "read", email_id=ids[0], **together)

    def _administer(self) -> bytes:
        """What stands beside the two APIs: SendGrid's scopes, SES's account, and the double's own controls."""
        behaviour = self._books.behaviour
        if self._path == "/double":
            return octets_of(self._ordered() if self._method == "PUT" else Reply(200, self._books.told()))
        if self._path == "/v2/email/account":
            return octets_of(Reply(200, SES_ACCOUNT))
        if self._path != "/v3/scopes":
            return octets_of(Reply(404, {"errors": [{"message": "not found", "field": None}]}))
        if behaviour.key is not None and self._authorization != f"Bearer {behaviour.key}":
            return octets_of(SENDGRID.unauthorized())
        if isinstance(behaviour.fault, Reply):
            return octets_of(behaviour.fault)
        return octets_of(Reply(200, {"scopes": ["mail.send", "user.profile.read"]}))

    def _ordered(self) -> Reply:
        try:
            self._books.behaviour.change(orjson.loads(self._body))
        except _NONSENSE:
            return Reply(400, {"error": "not a behaviour"})
        return Reply(200, {})

    def _misbehave(self, act: Fault, octets: bytes) -> None:
        """Do what the script says, in place of the answer."""
        half = len(octets) // 2
        deeds: dict[Fault, Callable[[], None]] = {
            Fault.CLOSE: lambda: self._end(by_reset=False),
            Fault.RESET: lambda: self._end(by_reset=True),
            Fault.HANG: lambda: None,
            Fault.DRIP: lambda: self._drip(b"HTTP/1.1 202 Accepted\r\nX-Drip: "),
            Fault.DRIP_BODY: self._drip_body,
            Fault.HALF: lambda: self._send(
                answer(202, {"X-Message-Id": "half"}, b"x" * 50, announced=100), closes=True
            ),
            Fault.HALF_HEAD: lambda: self._send(octets[:half], closes=True),
            Fault.FLOOD: self._flood,
            Fault.HTML: lambda: self._send(answer(200, {"Content-Type": "text/html"}, _PAGE)),
            Fault.EMPTY: lambda: self._send(answer(200, {}, b"")),
            Fault.GARBAGE: lambda: self._send(b"220 smtp.example ESMTP\r\n", closes=True),
            Fault.REDIRECT: lambda: self._send(answer(307, {"Location": self._where()}, b"")),
            Fault.LAST_ANSWER: lambda: self._tell(octets, closes=True),
        }
        deeds[act]()

    def _where(self) -> str:
        return next(path for path, api in APIS.items() if api is self._api)

    def _later(self, octets: bytes) -> None:
        if seconds := self._books.behaviour.latency_seconds:
            self._loop.call_later(seconds, self._tell, octets)
        else:
            self._tell(octets)

    def _tell(self, octets: bytes, closes: bool = False) -> None:
        """Send a whole answer, and witness it if the kernel took it whole."""
        was_open = not self._transport.is_closing()
        self._send(octets, closes)
        if was_open and not self._transport.get_write_buffer_size():
            self._books.witness(self._number, "answered")

    def _send(self, octets: bytes, closes: bool = False) -> None:
        if not self._transport.is_closing():
            self._transport.write(octets)
            if closes:
                self._closes = True
                self._transport.close()

    def _end(self, *, by_reset: bool) -> None:
        self._closes = True
        if not by_reset:
            self._transport.close()
            return
        raw: socket.socket = self._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self._transport.abort()

    def _drip(self, octets: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(octets[:1])
            self._loop.call_later(DRIP_SECONDS, self._drip, octets[1:] or b"x")

    def _drip_body(self) -> None:
        self._send(answer(202, {"X-Message-Id": "drip"}, b"", announced=1_000_000))
        self._drip(b"x")

    def _flood(self) -> None:
        self._send(answer(202, {"X-Message-Id": "flood"}, b"", announced=FLOOD_OCTETS))
        for _ in range(FLOOD_OCTETS // len(_CHUNK)):
            self._send(_CHUNK)
