"""Stores the keys of the HTTP API, and how many recipients of its daily quota each key has used."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime

from dispatcher.store.connections import Pool
from dispatcher.store.statement import statement
from dispatcher.store.statements import Source, fetch


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key of the HTTP API, with its rights and limits.

    Attributes:
        tenant_id: The tenant that the key acts for; None if it acts for every tenant.
        secret_hash: SHA-256 of the secret.
        scopes: What the key may do: values of `domain.api_key.Scope`.
        sender_domains: Domains that the key may send from. If both `sender_domains` and `sender_addresses` are None,
            the key may send from any address.
        lane: The lane of emails that do not set a lane. If None, an operator's lane rule for the sender decides;
            without such a rule, the lane is `normal`.
        allowed_lanes: The lanes that an email may set, besides `lane`.
    """

    key_id: str
    tenant_id: str | None
    name: str
    secret_hash: bytes = field(repr=False)
    scopes: frozenset[str]
    sender_domains: frozenset[str] | None
    sender_addresses: frozenset[str] | None
    requests_per_second: float | None
    recipients_per_day: int | None
    created_at: datetime
    revoked_at: datetime | None
    lane: str | None = None
    allowed_lanes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Grant:
    """Recipients taken from a key's daily quota.

    Attributes:
        recipients: Number of recipients taken; 0 if the quota had fewer recipients left than the call needed.
    """

    day: date
    recipients: int
    seconds_left: float


@statement
async def list_keys(source: Source) -> list[ApiKey]: ...


class KeyStore:
    """Reads API keys, and takes recipients from their daily quotas, for a process of the HTTP API.

    Each method raises StoreUnavailable if the same call might succeed later.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def list_keys(self) -> list[ApiKey]:
        """All keys, including revoked keys, oldest first."""
        return await list_keys(self._pool)

    async def take_recipients(self, key_id: str, *, needed: int, wanted: int, quota: int) -> Grant:
        """Takes `wanted` recipients from the key's quota for today, or as many as are left.

        Args:
            needed: If the quota has fewer recipients left than this, nothing is taken.
        """
        parameters = {"key_id": key_id, "needed": needed, "wanted": wanted, "quota": quota}
        while True:
            if grants := await fetch(self._pool, "take_recipients", parameters, into=Grant):
                return grants[0]
            await fetch(self._pool, "begin_recipient_day", {"key_id": key_id})

    async def return_recipients(self, key_id: str, day: date, returned: int) -> None:
        """Adds unused recipients, which `take_recipients` has taken, to the key's quota for the day again."""
        await fetch(self._pool, "return_recipients", {"key_id": key_id, "day": day, "returned": returned})
