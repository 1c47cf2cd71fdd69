"""The API's keys and what they have used of their quotas."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from psycopg import Connection
from psycopg.rows import TupleRow

from dispatcher.store.connections import Pool, session, translated
from dispatcher.store.queries import query


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


def insert_key(connection: Connection[TupleRow], values: dict[str, Any]) -> None:
    """Stores a new key, whose columns these are."""
    with translated():
        connection.execute(query("insert_api_key"), values)


def list_keys(connection: Connection[TupleRow]) -> list[ApiKey]:
    """Every key there ever was, oldest first."""
    with translated():
        return [_key(row) for row in connection.execute(query("list_api_keys")).fetchall()]


def revoke_key(connection: Connection[TupleRow], key_id: str) -> bool:
    """Ends a key; whether it was alive."""
    with translated():
        return connection.execute(query("revoke_api_key"), {"key_id": key_id}).fetchone() is not None


class KeyStore:
    """The API process's statements about keys; each raises StoreUnavailable where the same call may succeed later."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def list_keys(self) -> list[ApiKey]:
        """Every key there ever was, oldest first."""
        return [_key(row) for row in await self._fetch("list_api_keys", {})]

    async def take_recipients(self, key_id: str, *, needed: int, wanted: int, quota: int) -> Grant:
        """Takes what is wanted of the key's quota of today, or all that is left of it; nothing if that is not enough.

        Args:
            needed: Fewer are of no use.
        """
        parameters = {"key_id": key_id, "needed": needed, "wanted": wanted, "quota": quota}
        while True:
            if rows := await self._fetch("take_recipients", parameters):
                return Grant(*rows[0])
            await self._execute("begin_recipient_day", {"key_id": key_id})

    async def return_recipients(self, key_id: str, day: date, returned: int) -> None:
        """Gives back what was taken of a day and not used."""
        await self._execute("return_recipients", {"key_id": key_id, "day": day, "returned": returned})

    async def _fetch(self, name: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        async with session(self._pool) as connection:
            cursor = await connection.execute(query(name), parameters)
            return await cursor.fetchall()

    async def _execute(self, name: str, parameters: dict[str, Any]) -> None:
        async with session(self._pool) as connection:
            await connection.execute(query(name), parameters)


def _key(row: tuple[Any, ...]) -> ApiKey:
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
