"""AWS's Signature Version 4, learned from botocore's signer and repeated at a tenth of its cost.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html. All requests to one URL are
signed alike, but for their time and the digest of their body. So botocore's signer signs one of them; we put time and
digest in the same places, and have to come to the very same signature before the first request is signed. The key that
signs depends on the day, the region and the service, and is kept.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from dispatcher.errors import ProviderFault
from dispatcher.transport.body import Body


async def digest_of(body: bytes | Body) -> str:
    """A body's SHA-256 in hexadecimal; the loop serves others while a large body is read."""
    if isinstance(body, bytes):
        return sha256(body).hexdigest()
    digest = sha256()
    for piece in body.pieces():
        digest.update(piece)
        await asyncio.sleep(0)
    return digest.hexdigest()


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
