"""Posts notices to one configured https URL, signed according to Standard Webhooks (https://www.standardwebhooks.com).

Follows no redirect and uses no proxy. Retries of a notice have the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import h11
from standardwebhooks.webhooks import Webhook

from dispatcher.alerts.contract import NotDelivered, cause_of
from dispatcher.alerts.destination import Resolve, addresses_of, resolve
from dispatcher.alerts.wording import payload
from dispatcher.domain.alert import Notice
from dispatcher.errors import ConfigurationError
from dispatcher.transport.tls import client_context
from dispatcher.version import VERSION

TOTAL_SECONDS: Final = 10.0
CONNECT_SECONDS: Final = 4.0
_HTTPS: Final = 443


class WebhookChannel:
    """Posts each notice to the webhook."""

    name = "webhook"

    def __init__(
        self,
        url: str,
        secret: str,
        *,
        allow_private: bool = False,
        ca_file: Path | None = None,
        resolver: Resolve = resolve,
        total_seconds: float = TOTAL_SECONDS,
    ) -> None:
        """Opens no connection yet.

        Args:
            secret: The signing secret: `whsec_` followed by base64.
            ca_file: Certificates to trust in addition to the system's, as PEM.

        Raises:
            ConfigurationError: The CA file is not usable.
        """
        self._url = urlsplit(url)
        self._host = self._url.hostname or ""
        self._port = self._url.port or _HTTPS
        self._signer = Webhook(secret)
        self._allow_private = allow_private
        self._context = client_context()
        if ca_file is not None:
            try:
                self._context.load_verify_locations(cafile=str(ca_file))
            except OSError as error:
                words = f"DISPATCHER_CA_FILE ({ca_file}) contains no readable PEM certificate."
                raise ConfigurationError([words]) from error
        self._resolver = resolver
        self._total_seconds = total_seconds

    async def send(self, notice: Notice) -> str:
        """See `Channel.send`. Succeeds if the response has a 2xx status."""
        try:
            async with asyncio.timeout(self._total_seconds):
                status = await self._send(notice)
        except TimeoutError:
            raise NotDelivered(f"no answer within {self._total_seconds:g} s") from None
        if not 200 <= status < 300:
            raise NotDelivered(f"it answered {status}")
        return f"it answered {status}"

    async def _send(self, notice: Notice) -> int:
        """Posts the notice to the first address that answers; returns the response's status."""
        found = await addresses_of(self._host, self._port, allow_private=self._allow_private, resolver=self._resolver)
        body = payload(notice)
        fault: OSError | h11.RemoteProtocolError = OSError()
        for address in found:
            try:
                return await self._post(address, notice.notice_id, body)
            except (OSError, h11.RemoteProtocolError) as error:
                fault = error  # for example, an IPv6 address on a host without IPv6
        raise NotDelivered(f"no answer: {cause_of(fault)}") from fault

    async def _post(self, address: str, notice_id: str, body: bytes) -> int:
        async with asyncio.timeout(min(CONNECT_SECONDS, self._total_seconds)):
            reader, writer = await asyncio.open_connection(
                address, self._port, ssl=self._context, server_hostname=self._host
            )
        try:
            connection = h11.Connection(h11.CLIENT)
            target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
            request = h11.Request(method="POST", target=target, headers=self._headers(notice_id, body))
            events = (request, h11.Data(data=body), h11.EndOfMessage())
            writer.write(b"".join(connection.send(event) or b"" for event in events))
            # The response's body is not needed, so it is not read.
            while not isinstance(event := connection.next_event(), h11.Response):
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(4096))
                elif isinstance(event, h11.ConnectionClosed):
                    raise ConnectionResetError("it closed the connection")
            return event.status_code
        finally:
            writer.transport.abort()

    def _headers(self, notice_id: str, body: bytes) -> list[tuple[str, str]]:
        now = datetime.now(UTC).replace(microsecond=0)
        return [
            ("host", self._url.netloc),
            ("connection", "close"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("user-agent", f"EmailDispatcher/{VERSION}"),
            ("webhook-id", notice_id),
            ("webhook-timestamp", str(int(now.timestamp()))),
            ("webhook-signature", self._signer.sign(notice_id, now, body.decode())),
        ]
