"""Who signs a request to SES, and how.

**Credentials.** botocore finds and renews them in a thread, so that the loop never waits. The search and each renewal
may ask a server (an instance's metadata, STS, SSO), which may take minutes. Emails wait only if no valid credentials
are at hand: until the first search has ended, or if a renewal does not end before the old credentials expire.

**The signature.** AWS's Signature Version 4, learned from botocore's signer and repeated at a tenth of its cost.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html. All requests to one URL are
signed alike, but for their time and the digest of their body. So botocore's signer signs one of them; we put time and
digest in the same places, and have to come to the very same signature before the first request is signed. The key that
signs depends on the day, the region and the service, and is kept.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import botocore.session
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import NoCredentialsError

from dispatcher.errors import ProviderFault

LOOK_SECONDS: Final = 1.0
"""Between two checks whether the credentials have to be renewed."""
RENEW_AGAIN_SECONDS: Final = 30.0
"""Between two renewals, while the credentials are valid."""
LAST_SECONDS: Final = 30
"""Credentials that expire within so many seconds sign no request: it has to reach SES before."""

_Found = tuple[Any, ReadOnlyCredentials]
"""What renews them, and the credentials themselves."""


class AwsCredentials:
    """The credentials of a session, for one loop."""

    def __init__(self, session: botocore.session.Session) -> None:
        """Asks nobody; the first email starts the search."""
        self._session = session
        self._source: Any = None
        self._frozen: ReadOnlyCredentials | None = None
        self._coming: asyncio.Future[_Found] | None = None
        self._looks_at = 0.0
        self._renews_at = 0.0

    def at_hand(self) -> ReadOnlyCredentials | None:
        """The credentials to sign with now; None if an email has to `wait`. Starts a renewal when one is due."""
        if isinstance(self._source, RefreshableCredentials):
            now = asyncio.get_running_loop().time()
            if now >= self._looks_at:
                self._looks_at = now + LOOK_SECONDS
                self._look(now)
        return self._frozen

    async def wait(self, deadline: float) -> ReadOnlyCredentials:
        """The credentials to sign with, once botocore has found or renewed them.

        Args:
            deadline: In the loop's `time()`.

        Raises:
            TimeoutError: the deadline passed.
            Exception: what botocore raised because it found none.
        """
        if found := self.at_hand():
            return found
        async with asyncio.timeout_at(deadline):
            # One email's deadline must not cancel what all of them wait for.
            _, found = await asyncio.shield(self._begin())
        return found

    def _look(self, now: float) -> None:
        """Starts a renewal if one is due, and drops credentials that expire."""
        if self._coming is None and now >= self._renews_at and self._source.refresh_needed():
            self._renews_at = now + RENEW_AGAIN_SECONDS
            self._begin()
        if self._source.refresh_needed(LAST_SECONDS):
            self._frozen = None

    def _begin(self) -> asyncio.Future[_Found]:
        """Starts a thread that finds or renews them, unless one is running; done when the thread has ended."""
        if self._coming is None:
            self._coming = _in_thread(self._find)
            self._coming.add_done_callback(self._take)
        return self._coming

    def _find(self) -> _Found:
        """What the thread does."""
        source = self._source or self._session.get_credentials()
        if source is None:
            raise NoCredentialsError
        return source, source.get_frozen_credentials()

    def _take(self, found: asyncio.Future[_Found]) -> None:
        self._coming = None
        if found.exception() is None:
            self._source, self._frozen = found.result()
            self._looks_at = found.get_loop().time() + LOOK_SECONDS


def _in_thread(find: Callable[[], _Found]) -> asyncio.Future[_Found]:
    """The function's result, from a daemon thread: a process that exits does not wait for it."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[_Found] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = functools.partial(found.set_result, find())
        except Exception as error:  # noqa: BLE001 - the edge of a thread
            settle = functools.partial(found.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="aws-credentials", daemon=True).start()
    return found


@dataclass(frozen=True, slots=True)
class _Form:
    """How requests to one URL are signed.

    Attributes:
        before: botocore's canonical request up to the time.
        after: The canonical request between the time and the body's digest.
        signed_headers: Their names, as the signature lists them.
    """

    before: str
    after: str
    signed_headers: str


class Signer:
    """Signs for one service in one region, with credentials that are not renewed any more."""

    def __init__(
        self,
        credentials: ReadOnlyCredentials,
        service: str,
        region: str,
        headers: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            headers: Of every request, `Host` among them.
        """
        self.credentials = credentials
        self._botocore = SigV4Auth(credentials, service, region)
        self._place = f"{region}/{service}/aws4_request"
        self._headers = dict(headers)
        if credentials.token:
            self._headers["X-Amz-Security-Token"] = credentials.token
        self._clock = clock
        self._forms: dict[tuple[str, str], _Form] = {}
        self._second = 0
        self._timestamp = self._day = ""
        self._key = b""

    def sign(self, method: str, url: str, digest: str) -> dict[str, str]:
        """The headers of a request that leaves now, its time and signature among them.

        Args:
            digest: The body's, as `digest_of` gives it.

        Raises:
            ProviderFault: this botocore signs in a way that we do not know.
        """
        form = self._forms.get((method, url)) or self._learn(method, url)
        second = int(self._clock())
        if second != self._second:
            self._second, self._timestamp = second, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        timestamp = self._timestamp
        return {
            **self._headers,
            "X-Amz-Date": timestamp,
            "Authorization": self._authorization(form, timestamp, digest),
        }

    def _learn(self, method: str, url: str) -> _Form:
        request = AWSRequest(method, url, self._headers)
        self._botocore.add_auth(request)
        theirs = request.headers["Authorization"]
        del request.headers["Authorization"]
        timestamp = request.headers["X-Amz-Date"]
        before, _, rest = self._botocore.canonical_request(request).partition(timestamp)
        after, newline, digest = rest.rpartition("\n")
        signed_headers = self._botocore.signed_headers(self._botocore.headers_to_sign(request))
        form = _Form(before, after + newline, signed_headers)
        if self._authorization(form, timestamp, digest) != theirs:
            raise ProviderFault(
                "ses",
                "this botocore signs requests in a way that we do not know.",
                remedy="Install the versions that stand in requirements/runtime.txt.",
            )
        self._forms[method, url] = form
        return form

    def _authorization(self, form: _Form, timestamp: str, digest: str) -> str:
        day = timestamp[:8]
        if day != self._day:
            self._day, self._key = day, self._key_of(day)
        scope = f"{day}/{self._place}"
        request = sha256(f"{form.before}{timestamp}{form.after}{digest}".encode()).hexdigest()
        to_sign = f"AWS4-HMAC-SHA256\n{timestamp}\n{scope}\n{request}"
        signature = hmac.digest(self._key, to_sign.encode(), "sha256").hex()
        return (
            f"AWS4-HMAC-SHA256 Credential={self.credentials.access_key}/{scope}, "
            f"SignedHeaders={form.signed_headers}, Signature={signature}"
        )

    def _key_of(self, day: str) -> bytes:
        key = f"AWS4{self.credentials.secret_key}".encode()
        for part in (day, *self._place.split("/")):
            key = hmac.digest(key, part.encode(), "sha256")
        return key
