"""The certificates of Amazon SNS: fetches each of them once, and keeps those that have verified a message.

A client that knows an allowed topic can post messages that name many certificates, most of which do not exist. These
messages delay a genuine message only for a short time:

- A certificate that has verified a message is *proven*. It is stored in the database, and no other one replaces it.
- The result of a fetch is kept for each certificate, also if the certificate does not exist.
- Half of the concurrent fetches are for certificates that at least two messages have named. Of several such
  certificates, the one that was named most often is fetched next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from dispatcher.errors import StoreUnavailable
from dispatcher.events.contract import EventsRefused, Refusal, SourceUnavailable
from dispatcher.store.events import list_sns_certificates, store_sns_certificate
from dispatcher.store.statements import Source
from dispatcher.transport.http_response import HttpResponse

Fetch = Callable[[str], Awaitable[HttpResponse]]
"""Sends a GET request. Raises SourceUnavailable if there is no response."""

MAX_CERTIFICATES: Final = 16
CONCURRENT_FETCHES: Final = 4
MAX_WAITING: Final = 64
"""The most messages that wait for fetches. Further messages are refused for now, and so occupy no request slot."""
MAX_NAMES: Final = 8192
"""The most URLs whose last result, or number of messages, is remembered."""
RETRY_SECONDS: Final = 1.0
"""The shortest time between two fetches of one certificate."""
REFUSED_SECONDS: Final = 60.0
"""How long a certificate that does not exist, has expired or is not valid yet is not fetched again."""
_NO_SUCH_FILE: Final = frozenset({403, 404})

T = TypeVar("T")


@dataclass(slots=True)
class _Certificate:
    key: RSAPublicKey
    valid_from: float
    valid_until: float
    pem: bytes
    is_proven: bool = False


class Certificates:
    """The public keys of SNS's certificates, by URL."""

    def __init__(
        self, fetch: Fetch, clock: Callable[[], float], source: Source | None, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        """`source`: where proven certificates are stored; None to store none."""
        self._fetch = fetch
        self._clock = clock
        self._source = source
        self._retry_seconds = retry_seconds
        self._known: dict[str, _Certificate] = {}
        self._faults: dict[str, tuple[float, EventsRefused | SourceUnavailable]] = {}
        self._fetches: dict[str, asyncio.Task[RSAPublicKey | EventsRefused | SourceUnavailable]] = {}
        self._named: dict[str, int] = {}
        self._waiting = 0

    async def load(self) -> None:
        if self._source is not None:
            for url, pem in await list_sns_certificates(self._source, MAX_CERTIFICATES):
                with suppress(EventsRefused, SourceUnavailable):  # of a damaged row: the certificate is fetched again
                    self._known[url] = _parsed(pem.encode(), is_proven=True)

    async def key_of(self, url: str) -> RSAPublicKey:
        """The public key of the certificate at a URL. Raises EventsRefused or SourceUnavailable."""
        known = self._known.get(url)
        if known is not None and self._is_valid(known):
            return known.key
        until, fault = self._faults.get(url, (0.0, None))
        if fault is not None and time.monotonic() < until:
            raise fault.with_traceback(None)
        fetch = self._fetches.get(url) or self._begin_if_free(url)
        if fetch is None or self._waiting >= MAX_WAITING:
            raise SourceUnavailable("Too many messages name certificates of Amazon SNS that are not known yet.")
        self._waiting += 1
        try:
            found = await asyncio.shield(fetch)  # other messages wait for it, too
        finally:
            self._waiting -= 1
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    async def prove(self, url: str) -> None:
        """Stores a certificate that has verified a message. Does nothing if it is stored already."""
        known = self._known.get(url)
        if known is None or known.is_proven:
            return
        known.is_proven = True
        try:
            if self._source is not None:
                await store_sns_certificate(self._source, url, known.pem.decode(), MAX_CERTIFICATES)
        except StoreUnavailable:
            known.is_proven = False  # the next message tries again

    def _is_valid(self, certificate: _Certificate) -> bool:
        return certificate.valid_from <= self._clock() < certificate.valid_until

    def _begin_if_free(self, url: str) -> asyncio.Task[RSAPublicKey | EventsRefused | SourceUnavailable] | None:
        """Begins to fetch a certificate. If too many are being fetched, remembers that a message has named it."""
        times = self._named.get(url, 0) + 1
        if len(self._fetches) < (CONCURRENT_FETCHES if times > 1 else CONCURRENT_FETCHES // 2):
            return self._begin(url)
        _put(self._named, url, times)
        return None

    def _begin(self, url: str) -> asyncio.Task[RSAPublicKey | EventsRefused | SourceUnavailable]:
        self._named.pop(url, None)
        fetch = self._fetches[url] = asyncio.create_task(self._fetched(url))
        fetch.add_done_callback(lambda _: self._end(url))
        return fetch

    def _end(self, url: str) -> None:
        """Begins the next fetch after one has ended, or was cancelled because the process stops."""
        if not self._fetches.pop(url).cancelled():
            most, wanted = max(((times, each) for each, times in self._named.items()), default=(0, ""))
            if most > 1:
                self._begin(wanted)

    async def _fetched(self, url: str) -> RSAPublicKey | EventsRefused | SourceUnavailable:
        """Fetches a certificate, and keeps it, or why it is not usable."""
        try:
            found = _parsed(_pem_of(await self._fetch(url)))
            if not self._is_valid(found):
                raise _refused("The certificate of Amazon SNS has expired, or is not valid yet.")
        except (EventsRefused, SourceUnavailable) as fault:
            seconds = REFUSED_SECONDS if isinstance(fault, EventsRefused) else self._retry_seconds
            _put(self._faults, url, (time.monotonic() + seconds, fault))
            return fault
        if len(self._known) >= MAX_CERTIFICATES:
            # Replace the certificate that was added first, but a proven one only if all are proven.
            del self._known[min(self._known, key=lambda each: self._known[each].is_proven)]
        self._known[url] = found
        return found.key


def _pem_of(response: HttpResponse) -> bytes:
    if response.status in _NO_SUCH_FILE:
        raise _refused("Amazon SNS has no certificate at the message's SigningCertURL.")
    if response.status != 200:
        raise SourceUnavailable(f"Amazon SNS answered with status {response.status} instead of a certificate.")
    return response.body


def _parsed(pem: bytes, *, is_proven: bool = False) -> _Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        key = certificate.public_key()
    except ValueError as error:
        raise SourceUnavailable("Amazon SNS returned a file that is not a certificate.") from error
    if not isinstance(key, RSAPublicKey):
        raise _refused("The certificate has no RSA key.")
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return _Certificate(key, begin, end, pem, is_proven)


def _refused(detail: str) -> EventsRefused:
    return EventsRefused(Refusal.SIGNATURE, detail)


def _put(kept: dict[str, T], url: str, value: T) -> None:
    """Keeps a value under a URL, and drops what was kept longest ago if there is too much."""
    kept.pop(url, None)
    kept[url] = value
    if len(kept) > MAX_NAMES:
        del kept[next(iter(kept))]
