"""A POST to one fixed https URL, signed as Standard Webhooks says (https://www.standardwebhooks.com).

No redirect is followed and no proxy is used. The same notice carries the same `webhook-id` however often it is tried.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import DetailedPyreqwestError, PyreqwestError
from standardwebhooks.webhooks import Webhook

from dispatcher.alerts.contract import NotDelivered
from dispatcher.alerts.destination import Resolve, addresses_of, resolve
from dispatcher.alerts.wording import payload
from dispatcher.domain.alert import Notice
from dispatcher.errors import ConfigurationError
from dispatcher.version import VERSION

TOTAL_SECONDS: Final = 10.0
CONNECT_SECONDS: Final = 4.0
_HTTPS: Final = 443


class WebhookChannel:
    """See the module."""

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
        """Connects to nobody yet.

        Args:
            secret: `whsec_` and base64.
            ca_file: Certificates to trust besides the system's, as PEM.

        Raises:
            ConfigurationError: the CA file cannot be used.
        """
        parts = urlsplit(url)
        self._url = url
        self._host = parts.hostname or ""
        self._port = parts.port or _HTTPS
        self._signer = Webhook(secret)
        self._allow_private = allow_private
        self._certificates = _certificates(ca_file)
        self._resolver = resolver
        self._total_seconds = total_seconds

    async def send(self, notice: Notice) -> str:
        """See `Channel`."""
        try:
            async with asyncio.timeout(self._total_seconds):
                return await self._send(notice)
        except TimeoutError:
            raise NotDelivered(f"no answer within {self._total_seconds:g} s") from None

    async def _send(self, notice: Notice) -> str:
        found = await addresses_of(self._host, self._port, allow_private=self._allow_private, resolver=self._resolver)
        body = payload(notice)
        for address in found[:-1]:
            try:
                return await self._post(address, notice.notice_id, body)
            except PyreqwestError:
                continue  # such as an IPv6 address on a host without IPv6
        try:
            return await self._post(found[-1], notice.notice_id, body)
        except PyreqwestError as error:
            raise NotDelivered(_cause(error)) from error

    async def _post(self, address: str, notice_id: str, body: bytes) -> str:
        async with self._client(address) as client:
            request = client.post(self._url).body_bytes(body).streamed_read_buffer_limit(0)
            for name, value in self._headers(notice_id, body).items():
                request = request.header(name, value)
            # The answer's body is nothing to us: it is not read, however long it is.
            async with request.build_streamed() as response:
                if not 200 <= response.status < 300:
                    raise NotDelivered(f"it answered {response.status}")
                return f"it answered {response.status}"

    def _headers(self, notice_id: str, body: bytes) -> dict[str, str]:
        now = datetime.now(UTC).replace(microsecond=0)
        return {
            "content-type": "application/json",
            "user-agent": f"EmailDispatcher/{VERSION}",
            "webhook-id": notice_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": self._signer.sign(notice_id, now, body.decode()),
        }

    def _client(self, address: str) -> Client:
        """A client that knows the host under this one address; made anew for each notice, of which there are few."""
        builder = (
            ClientBuilder()
            .https_only(True)
            .http1_only()
            .follow_redirects(False)
            .referer(False)
            .no_proxy()
            .connect_timeout(timedelta(seconds=min(CONNECT_SECONDS, self._total_seconds)))
            .timeout(timedelta(seconds=self._total_seconds))
            .resolve(self._host, address, self._port)
        )
        for certificate in self._certificates:
            builder = builder.add_root_certificate_der(certificate)
        return builder.build()


def _certificates(ca_file: Path | None) -> list[bytes]:
    if ca_file is None:
        return []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=str(ca_file))
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(["DISPATCHER_CA_FILE holds no certificates that can be read, as PEM."]) from error
    return context.get_ca_certs(binary_form=True)


def _cause(error: PyreqwestError) -> str:
    """The innermost reason; the outer ones name the URL, which may hold a token."""
    causes = error.details["causes"] if isinstance(error, DetailedPyreqwestError) else None
    words = str(causes[-1]["message"]) if causes else type(error).__name__
    return f"no answer: {' '.join(words.split())[:200]}"
