"""What can be read of an email: its row, its attempts, what it waits for, and its whole story."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from psycopg.rows import dict_row

from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import Status
from dispatcher.domain.waiting import MOST_AHEAD, Facts, describe_holder
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession, Pool, Session, session
from dispatcher.store.providers import find_troubles
from dispatcher.store.queries import ids_within, query
from dispatcher.store.statements import fetch, fetch_sync, made, session_of

Record = dict[str, Any]

EXAMINED_ROWS: Final = 20_000
"""Rows that one look at a list reads at most: some ten milliseconds."""
SAMPLE: Final = 1_000
"""A look of some milliseconds, however many emails are pending."""


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
    """A tenant's view of its emails. Each method raises StoreUnavailable where the same call may succeed later."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def find(self, tenant_id: str, email_id: UUID) -> EmailRow | None:
        """The tenant's email of that id."""
        parameters = {"tenant_id": tenant_id, "email_id": email_id}
        return next(iter(await fetch(self._pool, "find_tenant_email", parameters, into=EmailRow)), None)

    async def find_by_key(self, tenant_id: str, message_key: str) -> EmailRow | None:
        """The tenant's email of that key."""
        parameters = {"tenant_id": tenant_id, "message_key": message_key}
        return next(iter(await fetch(self._pool, "find_tenant_email_by_key", parameters, into=EmailRow)), None)

    async def list_attempts(self, email_id: UUID) -> list[AttemptRow]:
        """What was tried for an email, in order."""
        return await fetch(self._pool, "list_email_attempts", {"email_id": email_id}, into=AttemptRow)

    async def find_wait(self, email_id: UUID) -> Facts | None:
        """What an email waits for; None if it is finished. Does not count the emails ahead, which may take long."""
        async with session(self._pool) as connection:
            return await find_facts(connection, email_id, most_ahead=0)

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
            "status": wanted.status,
            "error_type": wanted.error_type,
            "provider": wanted.provider,
            "correlation_id": wanted.correlation_id,
        }
        if wanted.status in (None, Status.SENT):
            rows = await fetch(self._pool, "list_tenant_emails", parameters)
        else:
            rows = await fetch(self._pool, "list_unfinished_tenant_emails", parameters)
        emails = made(EmailRow, [row[:-1] for row in rows if row[0] is not None])
        return emails, emails[-1].email_id if len(emails) == limit else rows[0][-1]


async def find_facts(session: AsyncSession, email_id: UUID, *, most_ahead: int = MOST_AHEAD) -> Facts | None:
    """The facts about an email; None if it is finished or does not exist.

    Args:
        most_ahead: The most emails ahead of it that are counted; 0 counts none.
    """
    if not (rows := await fetch(session, "find_wait", {"email_id": email_id, "most_ahead": most_ahead})):
        return None
    ceilings: dict[str, float] = dict(await fetch(session, "list_ceilings"))
    return made(Facts, [(*rows[0], await find_troubles(session), ceilings)])[0]


async def find_holders(session: AsyncSession, email_id: UUID) -> list[str]:
    """Sessions that may hold a lock on the email's row for longer than a batched statement waits.

    Locks the row for an instant to find out, so a role that may only read gets an empty list.
    """
    ((may_lock,),) = await fetch(session, "may_lock")
    if not may_lock or not await fetch(session, "find_locked", ids_within([email_id])):
        return []
    return await fetch(session, "find_holders", {"age_seconds": BATCH_LOCK_SECONDS}, into=describe_holder)


async def find_ids_by_key(session: AsyncSession, tenant_id: str, message_keys: Collection[str]) -> dict[str, UUID]:
    """The emails that hold these message keys, by key; a key that no email holds is left out."""
    if not message_keys:
        return {}
    parameters = {"tenant_id": tenant_id, "message_keys": list(message_keys)}
    return dict(await fetch(session, "find_ids_by_key", parameters))


async def find_email(session: AsyncSession, email_id: UUID) -> Record | None:
    """Everything about it that is not private; None if there is none."""
    rows = await _records(session, "find_email", {"email_id": email_id})
    return rows[0] if rows else None


async def list_attempts(session: AsyncSession, email_id: UUID) -> list[Record]:
    """Its attempts, the first one first."""
    return await _records(session, "list_attempts", {"email_id": email_id})


async def list_acts(session: AsyncSession, email_id: UUID) -> list[Record]:
    """What people did to it, the first act first."""
    return await _records(session, "list_acts", {"email_id": email_id})


async def list_replays_of(session: AsyncSession, email_id: UUID) -> list[Record]:
    """The replays that it was part of, the first one first."""
    return await _records(session, "list_replays_of", {"email_id": email_id})


async def reveal_content(session: AsyncSession, email_id: UUID) -> Record | None:
    """What it says and to whom, attachments by name alone; None if it was deleted. Private: put the look on record."""
    rows = await _records(session, "reveal_content", {"email_id": email_id})
    if not rows:
        return None
    attachments = await _records(session, "list_attachment_names", {"email_id": email_id})
    return {**rows[0], "attachments": attachments}


async def _records(session: AsyncSession, name: str, parameters: Mapping[str, Any]) -> list[Record]:
    async with session_of(session), session.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(query(name), parameters)
        return await cursor.fetchall()


def sample_pending(connection: Session) -> list[OutgoingEmail]:
    """The oldest pending emails, with the fields that decide whether they can be sent; without bodies, attachments."""
    from dispatcher.store.leases import outgoing_email  # loads what `dlq show` does without

    rows = fetch_sync(connection, "sample_pending", {"limit": SAMPLE})
    return [outgoing_email(row[0], row[1:]) for row in rows]
