"""The API's keys and what they have used of their quotas."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from dispatcher.store.connections import Pool, Session
from dispatcher.store.statements import Row, fetch, fetch_sync


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who may ask for what.

    Attributes:
        key_id: What tells it from others, and no secret.
        secret_hash: SHA-256 of the secret.
        scopes: Out of `send`, `read` and `operate`.
        sender_domains: Domains that it may send from. Where both lists are None, it may send from anywhere.
        sender_addresses: Addresses that it may send from.
        requests_per_second: None for no limit.
        recipients_per_day: None for no quota.
        revoked_at: None while it is alive.
    """

    key_id: str
    tenant_id: str
    name: str
    secret_hash: bytes = field(repr=False)
    scopes: frozenset[str]
    sender_domains: frozenset[str] | None
    sender_addresses: frozenset[str] | None
    requests_per_second: float | None
    recipients_per_day: int | None
    created_at: datetime
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class Grant:
    """What was taken of a key's quota.

    Attributes:
        day: Of which day, in UTC and by PostgreSQL's clock.
        recipients: How many; 0 where fewer are left than were needed.
        seconds_left: Until that day ends.
    """

    day: date
    recipients: int
    seconds_left: float


def insert_key(connection: Session, values: dict[str, Any]) -> None:
    """Stores a new key, whose columns these are."""
    fetch_sync(connection, "insert_api_key", values)


def list_keys(connection: Session) -> list[ApiKey]:
    """Every key there ever was, oldest first."""
    return [_key(row) for row in fetch_sync(connection, "list_api_keys")]


def revoke_key(connection: Session, key_id: str) -> bool:
    """Ends a key; whether it was alive."""
    return bool(fetch_sync(connection, "revoke_api_key", {"key_id": key_id}))


class KeyStore:
    """The API process's statements about keys; each raises StoreUnavailable where the same call may succeed later."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def list_keys(self) -> list[ApiKey]:
        """Every key there ever was, oldest first."""
        return [_key(row) for row in await fetch(self._pool, "list_api_keys")]

    async def take_recipients(self, key_id: str, *, needed: int, wanted: int, quota: int) -> Grant:
        """Takes what is wanted of the key's quota of today, or all that is left of it; nothing if that is not enough.

        Args:
            needed: Fewer are of no use.
        """
        parameters = {"key_id": key_id, "needed": needed, "wanted": wanted, "quota": quota}
        while True:
            if grants := await fetch(self._pool, "take_recipients", parameters, into=Grant):
                return grants[0]
            await fetch(self._pool, "begin_recipient_day", {"key_id": key_id})

    async def return_recipients(self, key_id: str, day: date, returned: int) -> None:
        """Gives back what was taken of a day and not used."""
        await fetch(self._pool, "return_recipients", {"key_id": key_id, "day": day, "returned": returned})


def _key(row: Row) -> ApiKey:
    key_id, tenant_id, name, secret_hash, scopes, domains, addresses, *rest = row
    return ApiKey(
        key_id,
        tenant_id,
        name,
        bytes(secret_hash),
        frozenset(scopes),
        None if domains is None else frozenset(domains),
        None if addresses is None else frozenset(addresses),
        *rest,
    )
