"""AWS credentials and request signatures.

**Credentials.** botocore finds and renews them in a thread, so that the loop never blocks. The search and each renewal
can call a server (instance metadata, STS, SSO), which can take minutes. Emails wait only while there are no valid
credentials: until the first search has ended, or if the old credentials expire before a renewal has ended.

**The signature.** We sign requests ourselves, with AWS's Signature Version 4, at a tenth of the cost of botocore's
signer: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html.

A signature covers the canonical form of a request. All requests to one URL have the same canonical form, except for the
time and the digest of the body. Before our first request to a URL, botocore's signer signs an example request to this
URL, and this module copies the canonical form of the example. To sign a request, we put the request's time and digest
into the copy. As a test, we also sign the example. If our signature of the example differs from botocore's, we refuse
to send. The signing key depends on the day, the region and the service, and is cached.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import botocore.session
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import NoCredentialsError

from dispatcher.domain.scrub import OWN_SECRETS
from dispatcher.errors import ProviderFault
from dispatcher.host.daemon_thread import in_daemon_thread
from dispatcher.providers.ses.endpoint import new_session

EXPIRY_CHECK_SECONDS: Final = 1.0
"""The interval between two checks of whether the credentials need a renewal."""
RENEWAL_INTERVAL_SECONDS: Final = 30.0
"""The minimum interval between two renewals while the credentials are valid."""
MIN_VALID_SECONDS: Final = 30
"""Credentials that expire within this time sign no request, because the request must reach SES before they expire."""

_Found = tuple[Any, ReadOnlyCredentials]
"""What a search finds: botocore's object that renews the credentials, and the current credentials."""


class AwsCredentials:
    """The AWS credentials of a botocore session, for one event loop."""

    def __init__(self, session: botocore.session.Session, profile: str | None = None) -> None:
        """Does not search for credentials yet; the first email starts the search."""
        self._session = session
        self._profile = profile
        self._source: Any = None
        self._frozen: ReadOnlyCredentials | None = None
        self._pending: asyncio.Future[_Found] | None = None
        self._next_check_at = 0.0
        self._next_renewal_at = 0.0

    def current(self) -> ReadOnlyCredentials | None:
        """The credentials if they are valid; None if the caller must `wait` for them. Starts a renewal if it is due."""
        if isinstance(self._source, RefreshableCredentials):
            now = asyncio.get_running_loop().time()
            if now >= self._next_check_at:
                self._next_check_at = now + EXPIRY_CHECK_SECONDS
                if self._pending is None and now >= self._next_renewal_at and self._source.refresh_needed():
                    self._next_renewal_at = now + RENEWAL_INTERVAL_SECONDS
                    self._start_search()
                if self._source.refresh_needed(MIN_VALID_SECONDS):
                    self._frozen = None
        return self._frozen

    async def wait(self, deadline: float) -> ReadOnlyCredentials:
        """Waits until botocore has found or renewed the credentials. Raises botocore's exception, or TimeoutError at
        the deadline, in the loop's `time()`."""
        if found := self.current():
            return found
        async with asyncio.timeout_at(deadline):
            # All emails wait for the same search, so the deadline of one email must not cancel the search.
            _, found = await asyncio.shield(self._start_search())
        return found

    def discard(self, refused: ReadOnlyCredentials) -> None:
        """Forgets credentials that AWS has refused, so that `wait` starts a search, unless they are renewed already."""
        if refused is self._frozen:
            self._session = new_session(self._profile)  # a session keeps what it has found
            self._source = self._frozen = None

    def _start_search(self) -> asyncio.Future[_Found]:
        """Starts a thread that finds or renews the credentials, unless such a thread is running. Returns its future."""
        if self._pending is None:
            self._pending = in_daemon_thread(self._find, "aws-credentials")
            self._pending.add_done_callback(self._on_found)
        return self._pending

    def _find(self) -> _Found:
        source = self._source or self._session.get_credentials()
        if source is None:
            raise NoCredentialsError
        return source, source.get_frozen_credentials()

    def _on_found(self, found: asyncio.Future[_Found]) -> None:
        self._pending = None
        if found.exception() is None:
            self._source, self._frozen = found.result()
            OWN_SECRETS.register(f"AWS {self._profile or ''}", [self._frozen.secret_key, self._frozen.token or ""])
            self._next_check_at = found.get_loop().time() + EXPIRY_CHECK_SECONDS


@dataclass(frozen=True, slots=True)
class _CanonicalForm:
    """The canonical form of requests to one URL (AWS Signature Version 4), without time and digest."""

    before: str  # the part of the canonical request before the time
    after: str  # the part between the time and the body's digest
    signed_headers: str  # their names, as the header `Authorization` lists them


class Signer:
    """Signs requests for one service in one region with fixed credentials."""

    def __init__(
        self,
        credentials: ReadOnlyCredentials,
        service: str,
        region: str,
        headers: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`headers`: the headers that all requests have, including `Host`."""
        self.credentials = credentials
        self._botocore = SigV4Auth(credentials, service, region)
        self._scope_after_day = f"{region}/{service}/aws4_request"
        self._headers = dict(headers)
        if credentials.token:
            self._headers["X-Amz-Security-Token"] = credentials.token
        self._clock = clock
        self._forms: dict[tuple[str, str], _CanonicalForm] = {}
        self._second = 0
        self._timestamp = self._day = ""
        self._key = b""

    def sign(self, method: str, url: str, digest: str) -> dict[str, str]:
        """The headers of a request that is sent now. `digest`: the body's SHA-256."""
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

    def _learn(self, method: str, url: str) -> _CanonicalForm:
        request = AWSRequest(method, url, self._headers)
        self._botocore.add_auth(request)
        theirs = request.headers["Authorization"]
        del request.headers["Authorization"]
        timestamp = request.headers["X-Amz-Date"]
        before, _, rest = self._botocore.canonical_request(request).partition(timestamp)
        after, newline, digest = rest.rpartition("\n")
        signed_headers = self._botocore.signed_headers(self._botocore.headers_to_sign(request))
        form = _CanonicalForm(before, after + newline, signed_headers)
        if self._authorization(form, timestamp, digest) != theirs:
            raise ProviderFault(
                "ses",
                "the installed version of botocore signs requests in a way that is not supported.",
                remedy="Install the versions from requirements/runtime.txt.",
            )
        self._forms[method, url] = form
        return form

    def _authorization(self, form: _CanonicalForm, timestamp: str, digest: str) -> str:
        day = timestamp[:8]
        if day != self._day:
            key = f"AWS4{self.credentials.secret_key}".encode()
            for part in (day, *self._scope_after_day.split("/")):
                key = hmac.digest(key, part.encode(), "sha256")
            self._day, self._key = day, key
        scope = f"{day}/{self._scope_after_day}"
        request = sha256(f"{form.before}{timestamp}{form.after}{digest}".encode()).hexdigest()
        to_sign = f"AWS4-HMAC-SHA256\n{timestamp}\n{scope}\n{request}"
        signature = hmac.digest(self._key, to_sign.encode(), "sha256").hex()
        return (
            f"AWS4-HMAC-SHA256 Credential={self.credentials.access_key}/{scope}, "
            f"SignedHeaders={form.signed_headers}, Signature={signature}"
        )
