"""Posts JSON to a URL that an operator or an application has chosen, signed according to Standard Webhooks.

Alerts and webhooks use this module. It follows no redirect, uses no proxy, and connects only to addresses that it has
checked (see `destination`). It does not parse the response's body.

An application chooses the receiver, which may be hostile, and shares an event loop with alerts and other receivers. So
all that it sends before the end of its headers is limited, including informational (1xx) responses.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import h11

from dispatcher.domain.values import dataclass
from dispatcher.domain.webhook import LONGEST_RETRY_AFTER_SECONDS, signature
from dispatcher.errors import ConfigurationError
from dispatcher.transport.destination import NoAnswer, Resolve, addresses_of, cause_of
from dispatcher.transport.tls import http_context
from dispatcher.version import VERSION

CONNECT_SECONDS: Final = 4.0
_PORTS: Final = {"https": 443, "http": 80}
MAX_HEAD_OCTETS: Final = 16 * 1024
MAX_INFORMATIONAL: Final = 8
"""The most 1xx responses before a response. Receivers usually send none, and at most two: 100 and 103."""
_READ_OCTETS: Final = 4096


@dataclass(frozen=True, slots=True)
class PostAnswer:
    """A receiver's answer. `retry_after_seconds`: how long it asks us to wait; 0 if it does not ask."""

    status: int
    retry_after_seconds: float = 0.0

    @property
    def is_success(self) -> bool:
        """Whether the receiver accepted the post."""
        return 200 <= self.status < 300


def trusting_context(ca_file: Path | None) -> ssl.SSLContext:
    """See `tls.http_context`. Raises ConfigurationError if the file contains no readable certificate."""
    try:
        return http_context(ca_file, None)
    except OSError as error:
        words = f"DISPATCHER_CA_FILE ({ca_file}) contains no readable PEM certificate."
        raise ConfigurationError([words]) from error


class SignedPoster:
    """Posts signed JSON to one URL. Resolves the host's name only once, so use a new object for each round of posts."""

    def __init__(
        self,
        url: str,
        *,
        private_setting: str | None,
        context: ssl.SSLContext,
        total_seconds: float,
        resolver: Resolve,
    ) -> None:
        """`private_setting`: see `addresses_of`; if None, loopback addresses are also allowed over http://.
        `total_seconds`: the longest time for a post, including the time to connect."""
        self._url = urlsplit(url)
        self._host = self._url.hostname or ""
        self._port = self._url.port or _PORTS.get(self._url.scheme, 0)
        self._private_setting = private_setting
        self._context = context
        self._resolver = resolver
        self._addresses: asyncio.Task[Sequence[str]] | None = None
        self._total_seconds = total_seconds

    async def post(self, message_id: str, secrets: list[str], body: bytes) -> PostAnswer:
        """Posts a body, and returns the receiver's answer, whatever its status. Use the same `message_id` for each
        attempt. The request gets one signature for each of the `secrets`. Raises NoAnswer."""
        try:
            async with asyncio.timeout(self._total_seconds):
                return await self._post(message_id, secrets, body)
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._total_seconds:g} s") from None

    async def _post(self, message_id: str, secrets: list[str], body: bytes) -> PostAnswer:
        """Posts to the receiver's first address; if there is no answer, to the next address, and so on."""
        found = await self._find_addresses()
        if self._url.scheme != "https" and not (
            self._private_setting is None and all(ip_address(text.partition("%")[0]).is_loopback for text in found)
        ):
            raise NoAnswer("the URL must begin with https://")
        request = self._request(message_id, secrets, body)
        fault: OSError | h11.RemoteProtocolError = OSError()
        for address in found:
            try:
                return await self._exchange(address, request, body)
            except (OSError, h11.RemoteProtocolError) as error:
                # Try the next address: this address may be, for example, an IPv6 address on a host without IPv6.
                fault = error
        raise NoAnswer(f"no answer: {cause_of(fault)}") from fault

    async def _find_addresses(self) -> Sequence[str]:
        if self._addresses is None:
            found = addresses_of(self._host, self._port, private_setting=self._private_setting, resolver=self._resolver)
            self._addresses = asyncio.create_task(found)
        # Without the shield, the first post that times out would end the look-up for all posts.
        return await asyncio.shield(self._addresses)

    async def _exchange(self, address: str, request: h11.Request, body: bytes) -> PostAnswer:
        is_https = self._url.scheme == "https"
        async with asyncio.timeout(min(CONNECT_SECONDS, self._total_seconds)):
            reader, writer = await asyncio.open_connection(
                address,
                self._port,
                ssl=self._context if is_https else None,
                server_hostname=self._host if is_https else None,
            )
        try:
            connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_OCTETS)
            events = (request, h11.Data(data=body), h11.EndOfMessage())
            writer.write(b"".join(connection.send(event) or b"" for event in events))
            response = await _read_response(connection, reader)
            return PostAnswer(response.status_code, _retry_after(response))
        finally:
            writer.transport.abort()

    def _request(self, message_id: str, secrets: list[str], body: bytes) -> h11.Request:
        now = int(time.time())
        headers = [
            ("host", self._url.netloc),
            ("connection", "close"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("user-agent", f"EmailDispatcher/{VERSION}"),
            ("webhook-id", message_id),
            ("webhook-timestamp", str(now)),
            ("webhook-signature", signature(secrets, message_id, now, body)),
        ]
        target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        return h11.Request(method="POST", target=target, headers=headers)


async def _read_response(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Response:
    """Reads a response without its body. If the receiver sends too much before, no other address is tried."""
    octets_left, informational_left = MAX_HEAD_OCTETS, MAX_INFORMATIONAL
    while not isinstance(event := connection.next_event(), h11.Response):
        if event is h11.NEED_DATA and octets_left:
            # If octets are buffered, `read` does not yield to the loop.
            await asyncio.sleep(0)
            octets = await reader.read(min(octets_left, _READ_OCTETS))
            octets_left -= len(octets)
            connection.receive_data(octets)
        elif event is h11.NEED_DATA:
            raise NoAnswer(f"the headers of the answer are longer than {MAX_HEAD_OCTETS // 1024} KiB")
        elif isinstance(event, h11.InformationalResponse) and informational_left:
            informational_left -= 1
        elif isinstance(event, h11.InformationalResponse):
            raise NoAnswer(f"more than {MAX_INFORMATIONAL} informational answers (1xx)")
        else:
            raise ConnectionResetError("the receiver closed the connection")
    return event


def _retry_after(response: h11.Response) -> float:
    """The seconds of Retry-After, a number or a date (RFC 9110, section 10.2.3); 0 if it is missing or invalid."""
    text = next((value.decode("latin-1") for name, value in response.headers if name == b"retry-after"), "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return min(float(text), LONGEST_RETRY_AFTER_SECONDS)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # the parser raises OverflowError if a number has many digits
        return 0.0
    seconds = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(0.0, seconds), LONGEST_RETRY_AFTER_SECONDS)
