"""What can be read of an email: everything but its content, and only by its tenant."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.domain.waiting import Facts
from dispatcher.store.connections import Pool, session
from dispatcher.store.queries import query
from dispatcher.store.waiting import find_facts

EXAMINED_ROWS: Final = 20_000
"""Rows that one look at a list reads at most: some ten milliseconds."""


@dataclass(frozen=True, slots=True)
class EmailRow:
    """An email as its tenant may see it."""

    email_id: UUID
    message_key: str
    status: Status
    attempt_count: int
    correlation_id: str | None
    error_type: str | None
    error: str | None
    provider: str | None
    provider_message_id: str | None
    created_at: datetime
    sent_at: datetime | None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One provider call that ended."""

    attempt_number: int
    provider: str
    started_at: datetime
    finished_at: datetime
    outcome: str
    error_type: str | None
    error: str | None
    provider_code: str | None


@dataclass(frozen=True, slots=True)
class EmailFilter:
    """Which emails a list wants; None wants all."""

    status: Status | None = None
    error_type: str | None = None
    provider: str | None = None
    correlation_id: str | None = None


class EmailStore:
    """Looks at emails; each raises StoreUnavailable where the same call may succeed later."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def find(self, tenant_id: str, email_id: UUID) -> EmailRow | None:
        """The tenant's email of that id."""
        rows = await self._fetch("find_tenant_email", {"tenant_id": tenant_id, "email_id": email_id})
        return _email(rows[0]) if rows else None

    async def find_by_key(self, tenant_id: str, message_key: str) -> EmailRow | None:
        """The tenant's email of that key."""
        rows = await self._fetch("find_tenant_email_by_key", {"tenant_id": tenant_id, "message_key": message_key})
        return _email(rows[0]) if rows else None

    async def list_attempts(self, email_id: UUID) -> list[AttemptRow]:
        """What was tried for an email, in order."""
        return [AttemptRow(*row) for row in await self._fetch("list_email_attempts", {"email_id": email_id})]

    async def find_wait(self, email_id: UUID) -> Facts | None:
        """What an email waits for; None if it is finished. Does not count the emails ahead, which may take long."""
        async with session(self._pool) as connection:
            return await find_facts(connection, email_id, most_ahead=0)

    async def _fetch(self, name: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        async with session(self._pool) as connection:
            cursor = await connection.execute(query(name), parameters)
            return await cursor.fetchall()

    async def list(
        self, tenant_id: str, wanted: EmailFilter, *, below_id: UUID, from_id: UUID, limit: int
    ) -> tuple[list[EmailRow], UUID | None]:
        """Up to so many of a tenant's emails, newest first, from one id on and below another.

        Returns them, and the id below which the next look goes on; None if there is nothing more. A look reads
        `EXAMINED_ROWS` at most, so that it may find fewer than there are, or none, and yet there is more.
        """
        parameters: dict[str, Any] = {
            "tenant_id": tenant_id,
            "below_id": below_id,
            "from_id": from_id,
            "limit": limit,
            "examined": EXAMINED_ROWS,
            "status": None if wanted.status is None else wanted.status.value,
            "error_type": wanted.error_type,
            "provider": wanted.provider,
            "correlation_id": wanted.correlation_id,
        }
        if wanted.status in (None, Status.SENT):
            rows = await self._fetch("list_tenant_emails", parameters)
        else:
            rows = await self._fetch("list_unfinished_tenant_emails", parameters)
        emails = [_email(row[:-1]) for row in rows if row[0] is not None]
        return emails, emails[-1].email_id if len(emails) == limit else rows[0][-1]


def _email(row: tuple[Any, ...]) -> EmailRow:
    email_id, message_key, status, *rest = row
    return EmailRow(email_id, message_key, Status(status), *rest)
