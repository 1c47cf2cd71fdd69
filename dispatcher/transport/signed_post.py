"""Posts JSON to a URL that an operator or an application has chosen, signed according to Standard Webhooks.

Alerts and webhooks use this module. It follows no redirect, uses no proxy, and connects only to addresses that it has
checked (see `destination`). It does not read the response's body.

An application chooses the receiver, which may be hostile, and shares an event loop with alerts and other receivers. So
all that it sends before the end of its headers is limited, including informational (1xx) responses.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dispatcher.domain.values import dataclass
from dispatcher.domain.webhook import LONGEST_RETRY_AFTER_SECONDS, signature
from dispatcher.errors import ConfigurationError
from dispatcher.transport.call import Deadline
from dispatcher.transport.destination import NoAnswer, Resolve, addresses_of
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_connection import HttpConnection
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.transport.tcp import connect_to
from dispatcher.transport.tls import http_context
from dispatcher.version import VERSION

CONNECT_SECONDS: Final = 4.0
_PORTS: Final = {"https": 443, "http": 80}
MAX_HEAD_OCTETS: Final = 16 * 1024
MAX_INFORMATIONAL: Final = 8
"""The most 1xx responses before a response. Receivers usually send none, and at most two: 100 and 103."""
_MAX_POSTS: Final = 256
"""More posts than any caller makes at the same time."""
_untried: ContextVar[list[str]] = ContextVar("_untried")
"""The checked addresses to which the current post has not connected yet."""


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
        raise ConfigurationError([f"DISPATCHER_CA_FILE ({ca_file}) contains no readable PEM certificate."]) from error


class _HeadConnection(HttpConnection):
    """A connection whose response is complete when its headers are."""

    most_head_octets = MAX_HEAD_OCTETS
    _informational = 0

    def __init__(self, on_end: Callable[[HttpConnection], None]) -> None:
        super().__init__(on_end)
        # An answer with both Content-Length and Transfer-Encoding counts by its status: the body is not read, and no
        # other answer follows it.
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True)

    def data_received(self, data: bytes) -> None:
        room = self.most_head_octets - self._octets
        super().data_received(data[:room])
        if self.is_busy and len(data) > room:
            self._fail_head()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.fault is not None:
            self.status = None
        elif self.status is not None:
            self.abort()
            self._complete()
        elif self._informational < MAX_INFORMATIONAL:
            self._informational += 1
        else:
            self._fail(f"more than {MAX_INFORMATIONAL} informational answers (1xx)")


class SignedPoster:
    """Posts signed JSON to one URL. Resolves the host's name only once, so use a new object for each round of posts."""

    def __init__(
        self, url: str, *, private_setting: str | None, context: ssl.SSLContext, total_seconds: float, resolver: Resolve
    ) -> None:
        """`private_setting`: see `addresses_of`; if None, loopback addresses are also allowed over http://.
        `total_seconds`: the longest time for a post, including the time to connect."""
        self._url = url
        self._private_setting = private_setting
        self._resolver = resolver
        self._addresses: asyncio.Task[Sequence[str]] | None = None
        self._total_seconds = total_seconds
        self._transport = HttpTransport(
            connections=_MAX_POSTS,
            context=context,
            connect_seconds=min(CONNECT_SECONDS, total_seconds),
            connect=self._connect,
            kind=_HeadConnection,
        )

    async def post(self, message_id: str, secrets: list[str], body: bytes) -> PostAnswer:
        """Posts a body, and returns the receiver's answer, whatever its status. Use the same `message_id` for each
        attempt. The request gets one signature for each of the `secrets`. Raises NoAnswer."""
        now = int(time.time())
        headers = {
            "Connection": "close",
            "Content-Type": "application/json",
            "User-Agent": f"EmailDispatcher/{VERSION}",
            "webhook-id": message_id,
            "webhook-timestamp": str(now),
            "webhook-signature": signature(secrets, message_id, now, body),
        }
        # The timeout ends the call before the deadline, whose errors do not say how long we waited.
        deadline = asyncio.get_running_loop().time() + 2 * self._total_seconds
        try:
            async with asyncio.timeout(self._total_seconds):
                _untried.set(list(await self._find_addresses()))
                response = await self._send(headers, body, Deadline(deadline))
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._total_seconds:g} s") from None
        except (RequestNotSent, NoResponse) as error:
            raise NoAnswer(error.detail) from error
        return PostAnswer(response.status, min(response.retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS))

    async def _send(self, headers: Mapping[str, str], body: bytes, call: Deadline) -> HttpResponse:
        """Sends the request. If a server ends the connection before the request is sent, for example because of its
        certificate, connects to the other addresses."""
        while True:
            left = len(_untried.get())
            try:
                return await self._transport.post(self._url, headers, body, call)
            except RequestNotSent:
                if not 0 < len(_untried.get()) < left:
                    raise

    async def _find_addresses(self) -> Sequence[str]:
        if self._addresses is None:
            url = urlsplit(self._url)
            looked_up = addresses_of(
                url.hostname or "",
                url.port or _PORTS.get(url.scheme, 0),
                private_setting=self._private_setting,
                resolver=self._resolver,
            )
            self._addresses = asyncio.create_task(looked_up)
        # Without the shield, the first post that times out would end the look-up for all posts.
        found = await asyncio.shield(self._addresses)
        is_local = all(ip_address(text.partition("%")[0]).is_loopback for text in found)
        if urlsplit(self._url).scheme != "https" and not (self._private_setting is None and is_local):
            raise NoAnswer("the URL must begin with https://")
        return found

    async def _connect(self, host: str, port: int) -> socket.socket:
        """Connects to an untried address. An address may be, for example, of IPv6 on a host without IPv6."""
        kind, flags = socket.SOCK_STREAM, socket.AI_NUMERICHOST
        untried = _untried.get()
        found = [socket.getaddrinfo(each, port, type=kind, flags=flags)[0] for each in untried]
        connected = await connect_to(found, host)
        peer = connected.getpeername()
        untried[:] = [each for each, info in zip(untried, found, strict=True) if info[4] != peer]
        return connected
