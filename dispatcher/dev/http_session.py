"""The server's side of one HTTP/1.1 connection, with injected faults. See `http_double`.

Uses httptools and an asyncio protocol, because a web framework does not let us send incomplete or invalid answers.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from base64 import b64decode
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import httptools
import orjson

from dispatcher.dev.http_apis import RESEND, SENDGRID, TWILIO, Api, Mail, Request, api_of, document_of
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply, answer, octets_of
from dispatcher.dev.recording_server import Session

DRIP_SECONDS: Final = 0.02
FLOOD_OCTETS: Final = 64 * 1024 * 1024
_CHUNK: Final = bytes(64 * 1024)
_INVALID_DOCUMENT: Final = (ValueError, LookupError, TypeError, AttributeError)
"""The errors that `Api.read` and `Behaviour.change` raise for an invalid document."""
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
_PAGE: Final = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>ann@example.com, sign in</body></html>"


SES_ACCOUNT: Final = {
    "SendingEnabled": True,
    "ProductionAccessEnabled": True,
    "SendQuota": {"Max24HourSend": 50_000.0, "MaxSendRate": 1_000.0, "SentLast24Hours": 0.0},
}
"""The answer to `dispatcher doctor`'s request for the SES account."""


class HttpRecords(Protocol):
    """The records and the behaviour that all sessions of a server share. See `HttpDouble` for the attributes."""

    behaviour: Behaviour
    sessions: set[HttpSession]
    begun: Counter[str]
    answers: dict[str, tuple[bytes, bytes]]
    messages: deque[dict[str, Any]]
    reads: Counter[str]

    def accept(self, request: Request, mails: Sequence[Mail]) -> None:
        """Records the accepted emails of a request. Called before the answer is sent."""
        ...

    def record_request(self, request: Request, came: str) -> None:
        """Records a completely read request and its result."""
        ...

    def record_event(self, connection: int, event: str, **fields: object) -> None:
        """Records an event of a connection (see `HttpDouble.record_event`), if the server records events."""
        ...

    def counts(self) -> dict[str, object]:
        """The answer to `GET /double`."""
        ...


class HttpSession(Session):
    def __init__(self, records: HttpRecords, number: int) -> None:
        self._records = records
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._act: Fault | Reply | None = None
        self._begin()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Adds this session to the open sessions. asyncio calls this; if the server uses TLS, after the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._records.sessions.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._records.sessions.discard(self)
        self._records.record_event(self._number, "ended", by_us=self._closes, by_reset=exc is not None)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_url(self, url: bytes) -> None:
        """Stores a part of the request's target (called by httptools, like the other `on_…` methods)."""
        self._path += url.decode("ascii", "replace")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._authorization = value.decode("latin-1")
        elif name.lower() == b"idempotency-key":
            self._key = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Counts a request to send emails. Injects the fault CLOSE_UNREAD or RESET_UNREAD if it is due."""
        self._method = self._parser.get_method().decode("ascii")
        self._api: Api | None = api_of(self._path) if self._method == "POST" else None
        if self._api is None:
            return
        self._records.begun[self._path] += 1
        self._records.record_event(self._number, "began")
        self._act = self._records.behaviour.next_fault()
        if self._act is Fault.CLOSE_UNREAD or self._act is Fault.RESET_UNREAD:
            self._end(by_reset=self._act is Fault.RESET_UNREAD)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        """Answers the request, and prepares for the next request."""
        if not self._transport.is_closing():
            self._answer()
        self._begin()

    def _begin(self) -> None:
        self._path = self._method = self._authorization = self._key = ""
        self._body = bytearray()

    def _answer(self) -> None:
        behaviour = self._records.behaviour
        if self._api is None:
            self._send(self._administer())
        elif self._has_wrong_key(behaviour):
            self._send(octets_of(self._api.unauthorized()))
        else:
            self._judge(self._api, behaviour)

    def _has_wrong_key(self, behaviour: Behaviour) -> bool:
        if behaviour.key is None:
            return False
        if (scheme := self._authorization.partition(" ")[0]) == "Basic":
            user, _, secret = b64decode(self._authorization[6:]).decode().partition(":")
            return secret != behaviour.key or not user
        return scheme != "Bearer" or self._authorization[7:] != behaviour.key

    def _judge(self, api: Api, behaviour: Behaviour) -> None:
        try:
            request = api.read(document_of(api, self._body), len(self._body))
        except _INVALID_DOCUMENT:
            self._send(octets_of(api.malformed()))
            return
        self._record_read(request)
        if behaviour.throttled_until and time.time() < behaviour.throttled_until:
            self._records.record_request(request, "429")
            self._later(octets_of(api.throttled(behaviour.throttled_until)))
        elif isinstance(self._act, Reply):
            self._records.record_request(request, str(self._act.status))
            self._later(octets_of(self._act))
        elif refusal := api.refused(request, behaviour.culprits, names=behaviour.names_culprits):
            self._records.record_request(request, str(refusal.status))
            self._later(octets_of(refusal))
        elif self._act is Fault.FORGET:
            self._records.record_request(request, self._act)
            self._end(by_reset=False)
        else:
            octets = self._accept(api, request, behaviour)
            if self._act is None:
                self._later(octets)
            else:
                self._misbehave(self._act, octets)

    def _accept(self, api: Api, request: Request, behaviour: Behaviour) -> bytes:
        """Accepts a request, and returns the answer. For an idempotency key that was accepted before, accepts no email:
        returns the earlier answer, or 409 if the body differs."""
        key, body = self._key if api is RESEND else "", bytes(self._body)
        if key and (known := self._records.answers.get(key)):
            is_same = known[0] == body
            self._records.record_request(request, "repeated" if is_same else "409")
            return known[1] if is_same else octets_of(RESEND.changed())
        self._records.record_request(request, self._act if isinstance(self._act, Fault) else "accepted")
        self._records.accept(request, api.taken(request, behaviour.culprits))
        octets = api.accepted(request, behaviour.culprits)
        if key:
            self._records.answers[key] = body, octets
        if api is TWILIO:
            self._records.messages.append(orjson.loads(octets.partition(b"\r\n\r\n")[2]))
        return octets

    def _record_read(self, request: Request) -> None:
        ids = [mail.email_id for mail in request.mails]
        together = {"email_ids": ids} if len(ids) > 1 else {}
        self._records.record_event(self._number, "read", email_id=ids[0], **together)

    def _administer(self) -> bytes:
        """The answer to `/double`, and to the paths for accounts, domains, permissions and messages of Twilio."""
        behaviour = self._records.behaviour
        if self._path == "/double":
            return octets_of(self._change_behaviour() if self._method == "PUT" else Reply(200, self._records.counts()))
        if self._path == "/v2/email/account":
            return octets_of(Reply(200, SES_ACCOUNT))
        if self._path == "/domains":
            return octets_of(RESEND.unauthorized() if self._has_wrong_key(behaviour) else Reply(200, {"data": []}))
        if self._path.startswith("/2010-04-01/Accounts/AC"):
            return octets_of(self._twilio_answer(behaviour))
        if self._path != "/v3/scopes":
            return octets_of(Reply(404, {"errors": [{"message": "not found", "field": None}]}))
        if self._has_wrong_key(behaviour):
            return octets_of(SENDGRID.unauthorized())
        if isinstance(behaviour.fault, Reply):
            return octets_of(behaviour.fault)
        return octets_of(Reply(200, {"scopes": ["mail.send", "user.profile.read"]}))

    def _twilio_answer(self, behaviour: Behaviour) -> Reply:
        if self._has_wrong_key(behaviour):
            return TWILIO.unauthorized()
        if "/Messages" not in self._path:
            return Reply(200, {"status": "active", "type": "Full"})
        self._records.reads[self._path] += 1
        if behaviour.throttled_until and time.time() < behaviour.throttled_until:
            return TWILIO.throttled(behaviour.throttled_until)
        if isinstance(behaviour.fault, Reply):
            return behaviour.fault
        return TWILIO.found(self._path, self._records.messages)

    def _change_behaviour(self) -> Reply:
        try:
            self._records.behaviour.change(orjson.loads(self._body))
        except _INVALID_DOCUMENT:
            return Reply(400, {"error": "not a behaviour"})
        return Reply(200, {})

    def _misbehave(self, act: Fault, octets: bytes) -> None:
        """Injects a fault instead of the normal answer, of which some faults send a part."""
        half = octets.index(b"\r\n\r\n") // 2
        faults: dict[Fault, Callable[[], None]] = {
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
            Fault.REDIRECT: lambda: self._send(answer(307, {"Location": self._path}, b"")),
            Fault.LAST_ANSWER: lambda: self._send_answer(octets, closes=True),
        }
        faults[act]()

    def _later(self, octets: bytes) -> None:
        if seconds := self._records.behaviour.latency_seconds:
            self._loop.call_later(seconds, self._send_answer, octets)
        else:
            self._send_answer(octets)

    def _send_answer(self, octets: bytes, closes: bool = False) -> None:
        """Sends a whole answer. If the kernel takes the whole answer, records the event `answered`."""
        was_open = not self._transport.is_closing()
        self._send(octets, closes)
        if was_open and not self._transport.get_write_buffer_size():
            self._records.record_event(self._number, "answered")

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
