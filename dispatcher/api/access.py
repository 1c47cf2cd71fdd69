"""Access: who asks, and what they may.

Every key is in memory, read anew every few seconds: a request costs no look at the database, and a key that was revoked
works for these seconds at most. With DISPATCHER_API_ALLOW_ANONYMOUS=on, requests over the loopback need no key until
the first key is created. After that every request needs a key, even if all keys are revoked.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from dispatcher.api.problems import Flaw, Problem, pointer_of
from dispatcher.api.quotas import Quotas
from dispatcher.api.senders import may_send_from
from dispatcher.api.shares import Shares
from dispatcher.config.values import LOOPBACKS
from dispatcher.domain.api_key import Scope, Secret
from dispatcher.errors import StoreUnavailable
from dispatcher.store.api_keys import ApiKey, KeyStore
from dispatcher.telemetry.log import get_log

REFRESH_SECONDS: Final = 2.0
LOOK_AGAIN_SECONDS: Final = 0.2
"""A key that is not known may be new: it waits for the list to be read anew, which is done no more often than so."""
_NO_HASH: Final = bytes(32)
DEFAULT_TENANT: Final = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        key: None where the API is open: then everything is allowed, for any tenant.
        name: Whose share of slots and memory it uses: the key's, or the address's where there is no key.
    """

    key: ApiKey | None
    name: str

    def tenant(self, asked: object) -> str:
        """The tenant that the caller acts for.

        Raises:
            Problem: a request names another one than the key's.
        """
        if self.key is None:
            return asked if isinstance(asked, str) else DEFAULT_TENANT
        if asked is not None and asked != self.key.tenant_id:
            raise Problem("tenant-forbidden")
        return self.key.tenant_id

    def check_sender(self, sender: str, below: str = "") -> None:
        """Asserts that the caller may send from an address.

        Raises:
            Problem: the key names others.
        """
        if self.key is not None and not may_send_from(sender, self.key):
            flaw = Flaw("pointer", pointer_of("from", below), "is an address that this key may not send from")
            raise Problem("sender-forbidden", flaws=[flaw])


class Access:
    """The door: knows every key, and what each has used.

    Attributes:
        is_open: Whether requests need no key.
    """

    def __init__(self, store: KeyStore, slots: Shares, *, may_be_open: bool) -> None:
        """
        Args:
            slots: Requests that are worked on.
            may_be_open: Until there is a first key, requests need none.
        """
        self.is_open = may_be_open
        self.quotas = Quotas(store)
        self._slots = slots
        self._store = store
        self._keys: dict[str, ApiKey] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._looked_at = -math.inf
        self._failed_at = -math.inf
        self._looking = asyncio.Lock()

    @property
    def has_usable_keys(self) -> bool:
        """Whether there is a key that was not revoked."""
        return any(key.revoked_at is None for key in self._keys.values())

    async def refresh(self) -> None:
        """Reads the keys anew."""
        began_at = time.monotonic()
        self.know(await self._store.list_keys())
        self._looked_at = began_at

    def know(self, keys: Sequence[ApiKey]) -> None:
        """Takes these for all keys that there ever were."""
        self._keys = {key.key_id: key for key in keys}
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in self._keys}
        # For good: a table that is emptied, as by a restore, opens nothing again.
        self.is_open = self.is_open and not keys

    async def run(self) -> None:
        """Reads the keys anew until cancelled; while PostgreSQL is away, what was read last holds."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh()
            except StoreUnavailable as error:
                get_log().warning("store.connection_lost", reason=str(error), retry_in_seconds=REFRESH_SECONDS)

    @asynccontextmanager
    async def admitted(self, request: Request, scope: Scope) -> AsyncIterator[Caller]:
        """The caller, if they may do this, with a slot while the block runs. For requests without a body.

        Raises:
            Problem: as `caller` does, or `overloaded`.
        """
        caller = await self.caller(request, scope)
        self._slots.take(caller.name)
        try:
            yield caller
        finally:
            self._slots.give_back(caller.name)

    async def caller(self, request: Request, scope: Scope) -> Caller:
        """Who asks, if they may do this; costs the key one request.

        Raises:
            Problem: `unauthorized`, `insufficient-scope`, `host-forbidden` or `rate-limited`.
        """
        if self.is_open and "authorization" in request.headers:
            await self._look_again()
        if self.is_open:
            self._check_origin(request)
            address = request.scope.get("client")
            return Caller(None, address[0] if address else "")
        key = await self._key(request)
        if scope not in key.scopes:
            raise Problem("insufficient-scope", f"It needs the scope {scope.value}.")
        self.charge(key)
        return Caller(key, key.key_id)

    def charge(self, key: ApiKey | None, more: int = 0) -> None:
        """Charges a request, or the further emails that it turned out to bring, which go on a debt if need be.

        Raises:
            Problem: `rate-limited`.
        """
        if key is None or key.requests_per_second is None:
            return
        bucket = self._buckets.get(key.key_id)
        if bucket is None or bucket.per_second != key.requests_per_second:
            bucket = self._buckets[key.key_id] = _Bucket(key.requests_per_second)
        if more:
            bucket.owe(more)
        elif wait := bucket.take():
            raise Problem("rate-limited", retry_after=math.ceil(wait))

    async def _key(self, request: Request) -> ApiKey:
        given = request.headers.getlist("authorization")
        kind, _, text = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        secret = Secret.parse(text.strip()) if kind.lower() == "bearer" else None
        if secret is None:
            raise Problem("unauthorized")
        key = self._matching(secret)
        if key is None:
            # For a wrong secret, too: otherwise the time would tell which ids there are.
            await self._look_again()
            key = self._matching(secret)
        if key is None or key.revoked_at is not None:
            raise Problem("unauthorized", "The key is not known, or was revoked.")
        return key

    def _matching(self, secret: Secret) -> ApiKey | None:
        key = self._keys.get(secret.key_id)
        return key if secret.matches(key.secret_hash if key else _NO_HASH) else None

    async def _look_again(self) -> None:
        """Returns after a look that began later than this call; those who wait share it.

        Raises:
            StoreUnavailable: PostgreSQL does not say.
        """
        called_at = time.monotonic()
        async with self._looking:
            if self._failed_at >= called_at:
                # Who waited together fails together: one after the other, each would wait as long again.
                raise StoreUnavailable("The keys could not be read.")
            if self._looked_at < called_at:
                await asyncio.sleep(self._looked_at + LOOK_AGAIN_SECONDS - time.monotonic())
                try:
                    await self.refresh()
                except StoreUnavailable:
                    self._failed_at = time.monotonic()
                    raise

    def _check_origin(self, request: Request) -> None:
        """While we are open, only this host itself may ask.

        No web page reaches us by a name of its own that leads to the loopback (DNS rebinding). A proxy before us would
        let everybody in, and is refused where it says that it is one; many do not.
        """
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if name.strip("[]").lower() not in LOOPBACKS:
            raise Problem("host-forbidden", f"The header Host must name one of: {', '.join(LOOPBACKS)}.")
        if any(_tells_of_proxy(header) for header in request.headers):
            raise Problem("host-forbidden", "The request came through a proxy.")


def _tells_of_proxy(header: str) -> bool:
    return header in ("forwarded", "via") or header.startswith("x-forwarded-")


class _Bucket:
    """A key's rate in this process: holds a second's requests, and may go into debt."""

    __slots__ = ("_at", "_tokens", "per_second")

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self._tokens = max(1.0, per_second)
        self._at = time.monotonic()

    def take(self) -> float:
        """Takes a token; returns the seconds to wait if there is none."""
        now = time.monotonic()
        self._tokens = min(max(1.0, self.per_second), self._tokens + (now - self._at) * self.per_second)
        self._at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self.per_second
        self._tokens -= 1
        return 0.0

    def owe(self, tokens: int) -> None:
        """Takes tokens that need not be there."""
        self._tokens -= tokens
