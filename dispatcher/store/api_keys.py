"""Stores the keys of the HTTP API, and how many recipients of its daily quota each key has used."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime

from dispatcher.store.connections import Pool
from dispatcher.store.statements import Source, fetch, statement


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key of the HTTP API, with its rights and limits."""

    key_id: str
    tenant_id: str | None  # None: the key acts for every tenant
    name: str
    secret_hash: bytes = field(repr=False)  # SHA-256 of the secret
    scopes: frozenset[str]  # what the key may do: values of `domain.api_key.Scope`
    sender_domains: frozenset[str] | None  # this and the next None: the key may send from any address
    sender_addresses: frozenset[str] | None
    requests_per_second: float | None
    recipients_per_day: int | None
    created_at: datetime
    revoked_at: datetime | None
    lane: str | None = None  # of emails that do not set one; None: by the lane rule for the sender, else `normal`
    allowed_lanes: frozenset[str] = frozenset()  # that an email may set, besides `lane`
    is_test: bool = False  # what the key enqueues never leaves


@dataclass(frozen=True, slots=True)
class Grant:
    """Recipients taken from a key's daily quota."""

    day: date
    recipients: int  # 0 if fewer were left than the call needed
    seconds_left: float
    left: int  # of the quota, after this call


@statement
async def list_keys(source: Source) -> list[ApiKey]: ...


class KeyStore:
    """Reads API keys, and takes recipients from their daily quotas. Each method raises StoreUnavailable if the same
    call might succeed later."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def list_keys(self) -> list[ApiKey]:
        """All keys, including revoked keys, oldest first."""
        return await list_keys(self._pool)

    async def take_recipients(self, key_id: str, *, needed: int, wanted: int, quota: int) -> Grant:
        """Takes `wanted` recipients from the key's quota for today, or as many as are left; none if fewer than `needed`
        are left."""
        parameters = {"key_id": key_id, "needed": needed, "wanted": wanted, "quota": quota}
        while True:
            if grants := await fetch(self._pool, "take_recipients", parameters, into=Grant):
                return grants[0]
            await fetch(self._pool, "begin_recipient_day", {"key_id": key_id})

    async def return_recipients(self, key_id: str, day: date, returned: int) -> None:
        """Adds unused recipients to the key's quota for the day again."""
        await fetch(self._pool, "return_recipients", {"key_id": key_id, "day": day, "returned": returned})
