"""API keys: their rights, and their rates and quotas.

Every process keeps all keys in memory, so a request needs no query for its key. The process reads the keys again every
two seconds, so a revoked key works for two seconds at most.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dispatcher.admission.problems import FieldError, Problem, pointer_of
from dispatcher.admission.quotas import Quotas
from dispatcher.domain.api_key import Scope, Secret
from dispatcher.domain.text import DEFAULT_TENANT
from dispatcher.errors import StoreUnavailable
from dispatcher.store.api_keys import ApiKey, KeyStore
from dispatcher.store.comparable_address import comparable_address
from dispatcher.telemetry.log import get_log

REFRESH_SECONDS: Final = 2.0
MIN_REFRESH_INTERVAL_SECONDS: Final = 0.2
"""The shortest time between two reads of all keys. A request with an unknown key causes a read, because the key may be
new."""
_NO_HASH: Final = bytes(32)
_KEY_ID: Final = re.compile(r"\bed_([0-9A-Za-z]+)")


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client. Without a key (None) it may do everything, for every tenant."""

    key: ApiKey | None
    name: str
    """Identifies the client for limits per caller: the key's id, or the client's IP address if it has no key."""

    @property
    def share(self) -> str:
        """Identifies the caller for limits per tenant. A key for all tenants has limits of its own."""
        return self.name if self.key is None or self.key.tenant_id is None else self.key.tenant_id

    def tenant(self, asked: object) -> str:
        """The tenant that a request acts for. `asked` is the request's `tenant_id`, if it has one.

        Raises a `Problem` if the request names a different tenant than the key's, or none with a key for all tenants.
        """
        if self.key is None:
            return asked if isinstance(asked, str) else DEFAULT_TENANT
        if self.key.tenant_id is None:
            if not isinstance(asked, str):
                raise Problem("tenant-missing", "Add tenant_id, or use a key of one tenant.")
            return asked
        if asked is not None and asked != self.key.tenant_id:
            raise Problem("tenant-forbidden", "Leave out tenant_id, or use a key of the tenant that tenant_id names.")
        return self.key.tenant_id

    def check_sender(self, sender: str, prefix: str = "") -> None:
        """Checks that the caller may send from an address.

        `prefix` is the JSON pointer to the email in the body, such as `/emails/3`; empty if the body is the email.
        """
        if self.key is not None and not _may_send_from(sender, self.key):
            error = FieldError("pointer", pointer_of("from", prefix), "is an address that this key may not send from")
            detail = "Use an address or domain that the key was created with, or another key."
            raise Problem("sender-forbidden", detail, errors=[error])

    def check_senders(self, senders: Sequence[str], prefix: str = "") -> None:
        for sender in senders:
            self.check_sender(sender, prefix)

    @property
    def lane(self) -> str | None:
        """The lane for emails that name no lane: the lane of the caller's key.

        None if there is no key, or the key has no lane. The email then gets the lane that `dispatcher lanes set --from`
        has set for its sender, or else the lane `normal`.
        """
        return None if self.key is None else self.key.lane

    @property
    def is_test(self) -> bool:
        """Whether what the caller enqueues must never leave."""
        return self.key is not None and self.key.is_test

    @property
    def sees_content(self) -> bool:
        """Whether the caller may read the senders, recipients and subjects of emails; never without a key."""
        return self.key is not None and Scope.CONTENT in self.key.scopes

    def check_lane(self, lane: str | None, prefix: str = "") -> None:
        """Checks that the caller may choose the lane that an email names, if it names one."""
        key = self.key
        if lane is not None and key is not None and lane != key.lane and lane not in key.allowed_lanes:
            error = FieldError("pointer", pointer_of("lane", prefix), "is a lane that this key may not use")
            detail = "Leave out lane, or use a key that was created with --lane or --allow-lane for this lane."
            raise Problem("lane-forbidden", detail, errors=[error])

    def check_scope(self, scope: Scope, field: str, prefix: str = "") -> None:
        """Checks that the caller's key has the scope that a field of an email needs, such as `ignore_suppression`."""
        if self.key is not None and scope not in self.key.scopes:
            error = FieldError("pointer", pointer_of(field, prefix), f"needs a key with the scope {scope.value}")
            raise Problem("insufficient-scope", f"Use a key that has the scope {scope.value}.", errors=[error])


class KeyAccess:
    """Finds API keys by their secrets, and enforces rates and quotas."""

    def __init__(self, store: KeyStore) -> None:
        self.quotas = Quotas(store)
        self._store = store
        self._keys: dict[str, ApiKey] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._refreshed_at = -math.inf
        self._failed_at = -math.inf
        self._refresh_lock = asyncio.Lock()

    @property
    def has_usable_keys(self) -> bool:
        """Whether at least one key is not revoked."""
        return any(key.revoked_at is None for key in self._keys.values())

    async def refresh(self) -> None:
        began_at = time.monotonic()
        self.set_keys(await self._store.list_keys())
        self._refreshed_at = began_at

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """Replaces the keys in memory. `keys` includes revoked keys."""
        self._keys = {key.key_id: key for key in keys}
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in self._keys}

    async def run(self) -> None:
        """Reads all keys every two seconds until cancelled.

        While PostgreSQL is unavailable, the keys in memory stay valid.
        """
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh()
            except StoreUnavailable as error:
                get_log().warning("store.connection_lost", reason=str(error), retry_in_seconds=REFRESH_SECONDS)

    def charge(self, key: ApiKey) -> None:
        """Counts a request against the key's rate. Raises `rate-limited`."""
        bucket = self.bucket_of(key)
        if bucket and (wait := bucket.acquire()):
            seconds = math.ceil(wait)
            limit = f"{bucket.per_second:g} per second"
            raise Problem("rate-limited", f"The key allows {limit}. Retry after {seconds} s.", retry_after=seconds)

    def charge_batch(self, key: ApiKey | None, more: int) -> None:
        """Counts a batch's emails, except the first, against the key's rate. `authenticate` has counted the first.

        These emails are never refused. If they exceed the rate, later requests with the key are refused.
        """
        if bucket := self.bucket_of(key):
            bucket.overdraw(more)

    def bucket_of(self, key: ApiKey | None) -> TokenBucket | None:
        """The key's token bucket; None if the key has no limit."""
        if key is None or key.requests_per_second is None:
            return None
        bucket = self._buckets.get(key.key_id)
        if bucket is None or bucket.per_second != key.requests_per_second:
            bucket = self._buckets[key.key_id] = TokenBucket(key.requests_per_second)
        return bucket

    def valid_key(self, key_id: str) -> ApiKey | None:
        """The key with this id; None if it does not exist or was revoked."""
        key = self._keys.get(key_id)
        return key if key is not None and key.revoked_at is None else None

    def is_own_act(self, actor: str | None, tenant_id: str | None) -> bool:
        """Whether an operator acted with an API key of the tenant. A tenant sees who acted, and why, only then."""
        found = _KEY_ID.search(actor or "")
        key = None if found is None else self.valid_key(found[1])
        return key is not None and key.tenant_id is not None and key.tenant_id == tenant_id

    async def find(self, secret: Secret) -> ApiKey | None:
        """The key with this secret; None if the key does not exist or was revoked, or if the secret is wrong."""
        if self._matching(secret) is None:
            # Refresh even if the id is known and only the secret is wrong: otherwise the response time would show
            # which ids exist.
            await self._refresh_after_now()
        return self.find_known(secret)

    def find_known(self, secret: Secret) -> ApiKey | None:
        """As `find`, but does not find a key that was created since all keys were read, up to two seconds ago."""
        key = self._matching(secret)
        return key if key is not None and key.revoked_at is None else None

    def _matching(self, secret: Secret) -> ApiKey | None:
        key = self._keys.get(secret.key_id)
        return key if secret.matches(key.secret_hash if key else _NO_HASH) else None

    async def _refresh_after_now(self) -> None:
        """Reads all keys, and so finds every key that was created before this call. Concurrent calls share one read."""
        called_at = time.monotonic()
        async with self._refresh_lock:
            if self._failed_at >= called_at:
                # The refresh failed while this call waited. If every waiting call now began a refresh of its own, the
                # calls would time out one after the other.
                raise StoreUnavailable("The API keys could not be read.")
            if self._refreshed_at < called_at:
                await asyncio.sleep(self._refreshed_at + MIN_REFRESH_INTERVAL_SECONDS - time.monotonic())
                try:
                    await self.refresh()
                except StoreUnavailable:
                    self._failed_at = time.monotonic()
                    raise


class TokenBucket:
    """A key's rate limit in this process. Each request takes a token, and `per_second` tokens are added per second.

    The bucket holds at most the tokens of one second, but always has room for one token.
    """

    __slots__ = ("_at", "_tokens", "per_second")

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self._tokens = max(1.0, per_second)
        self._at = time.monotonic()

    def left(self) -> tuple[int, int, int]:
        """The most tokens, those that are left, and the seconds until the bucket is full."""
        most = self._refill()
        return int(most), max(0, int(self._tokens)), math.ceil((most - self._tokens) / self.per_second)

    def _refill(self) -> float:
        now, most = time.monotonic(), max(1.0, self.per_second)
        self._tokens = min(most, self._tokens + (now - self._at) * self.per_second)
        self._at = now
        return most

    def acquire(self) -> float:
        """Takes a token and returns 0. If no token is available, returns the seconds until the next token."""
        self._refill()
        if self._tokens < 1:
            return (1 - self._tokens) / self.per_second
        self._tokens -= 1
        return 0.0

    def overdraw(self, tokens: int) -> None:
        """Takes tokens even if the bucket has too few. The missing tokens delay later requests."""
        self._tokens -= tokens


def _may_send_from(sender: str, key: ApiKey) -> bool:
    """Whether a key allows a valid address, or the sender of an SMS, which may be empty."""
    if not sender or (key.sender_domains is None and key.sender_addresses is None):
        return True  # without a sender, an SMS gets the default sender, which the operator has set
    address = comparable_address(sender) if "@" in sender else sender
    return address.rpartition("@")[2] in (key.sender_domains or ()) or address in (key.sender_addresses or ())
