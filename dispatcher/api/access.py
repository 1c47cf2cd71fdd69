"""Authenticates requests by API key, and checks the scopes and the rate of each key.

With DISPATCHER_API_ALLOW_ANONYMOUS=on, requests over the loopback need no key until the first key is created. After
that every request needs a key, even if all keys are revoked or deleted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import Request

from dispatcher.admission.access import Caller, KeyAccess, TokenBucket
from dispatcher.admission.fair_limiter import FairLimiter
from dispatcher.admission.problems import Problem
from dispatcher.api.http_protocol import LIMITS
from dispatcher.config.values import LOOPBACKS
from dispatcher.domain.api_key import Scope, Secret
from dispatcher.store.api_keys import ApiKey, KeyStore


class AccessControl(KeyAccess):
    """Authenticates requests, and enforces scopes, rates and quotas. `slots` limits the requests in progress."""

    def __init__(self, store: KeyStore, slots: FairLimiter, *, may_be_open: bool) -> None:
        self.is_open = may_be_open  # whether requests are allowed without a key, until the first key is created
        super().__init__(store)
        self._slots = slots

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        super().set_keys(keys)
        # Once a key has existed, requests need a key: `is_open` stays False, even if a restore of the database has
        # emptied the table of keys.
        self.is_open = self.is_open and not keys

    @asynccontextmanager
    async def admit(self, request: Request, scope: Scope) -> AsyncIterator[Caller]:
        """Authenticates a request without a body, and occupies a request slot during the block."""
        caller = await self.authenticate(request, scope)
        self._slots.acquire(caller.name)
        try:
            yield caller
        finally:
            self._slots.release(caller.name)

    @contextmanager
    def slot(self, name: str) -> Iterator[None]:
        """Occupies a request slot during the block, for a caller who needs no API key. Raises `overloaded`."""
        self._slots.acquire(name)
        try:
            yield
        finally:
            self._slots.release(name)

    async def authenticate(self, request: Request, *scopes: Scope) -> Caller:
        """Authenticates a request, checks that its key has one of the scopes, and counts it against the key's rate."""
        if self.is_open and "authorization" in request.headers:
            await self._refresh_after_now()
        if self.is_open:
            self.check_local(request)
            address = request.scope.get("client")
            return Caller(None, address[0] if address else "")
        key = await self._key(request)
        if not any(scope in key.scopes for scope in scopes):
            raise Problem("insufficient-scope", f"Use a key that has the scope {' or '.join(scopes)}.")
        bucket = self.bucket_of(key)
        if bucket or key.recipients_per_day:
            request.scope[LIMITS] = lambda: self._limits(key, bucket)
        self.charge(key)
        return Caller(key, key.key_id)

    def _limits(self, key: ApiKey, bucket: TokenBucket | None) -> list[tuple[bytes, bytes]]:
        """The headers with what the key may still use: of its rate in this process, and of its recipients per day."""
        left = {"ratelimit": bucket and bucket.left(), "x-quota": self.quotas.left(key)}
        return [
            (f"{name}-{part}".encode(), str(number).encode())
            for name, numbers in left.items()
            for part, number in zip(("limit", "remaining", "reset"), numbers or (), strict=False)
        ]

    async def _key(self, request: Request) -> ApiKey:
        given = request.headers.getlist("authorization")
        kind, _, text = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        secret = Secret.parse(text.strip()) if kind.lower() == "bearer" else None
        if secret is None:
            raise Problem("unauthorized", "Send one header `Authorization: Bearer ed_…`.")
        key = await self.find(secret)
        if key is None:
            raise Problem("unauthorized", "The API key does not exist, its secret is wrong, or it was revoked.")
        return key

    def check_local(self, request: Request) -> None:
        """Checks that a request without a key came directly to the loopback, and not through a proxy.

        A web page could reach the loopback under a domain name of its own (DNS rebinding). The check of the Host header
        prevents that. A proxy on this host would give every client access without a key, so requests with a proxy's
        headers are refused. A proxy that adds no such header is not detected.
        """
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if name.strip("[]").lower() not in LOOPBACKS:
            names = ", ".join(LOOPBACKS)
            detail = f"Without an API key, the Host header must be one of: {names}. Use one of them, or create a key."
            raise Problem("host-forbidden", detail)
        if any(name in ("forwarded", "via") or name.startswith("x-forwarded-") for name in request.headers):
            detail = "The request came through a proxy, so it needs an API key. Create a key."
            raise Problem("host-forbidden", detail)
