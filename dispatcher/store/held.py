"""Held emails: those of which nobody knows whether they arrived, until a person says so."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.failures import Selection
from dispatcher.store.queries import query


@dataclass(frozen=True, slots=True)
class HeldEmail:
    """An email whose outcome is unknown; nothing private."""

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    provider: str | None
    attempt_count: int
    last_error: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an email stands.

    Attributes:
        has_content: It could still be sent.
    """

    status: Status
    has_content: bool


async def list_held(
    session: AsyncSession, selection: Selection, *, after: UUID | None = None, limit: int = 50
) -> tuple[list[HeldEmail], int]:
    """A page of held emails, oldest first, and how many there are from its first one on."""
    parameters = {**selection.parameters, "after": after, "limit": limit}
    with translated():
        cursor = await session.execute(query("list_held"), parameters)
        rows = await cursor.fetchall()
    return [HeldEmail(*row[:-1]) for row in rows], rows[0][-1] if rows else 0


async def confirm_held(session: AsyncSession, email_id: UUID, *, actor: str, reason: str) -> bool:
    """Makes a held email `sent`, in one audited commit; False if it is not held."""
    with translated():
        cursor = await session.execute(query("confirm_held"), {"email_id": email_id, "actor": actor, "reason": reason})
        return await cursor.fetchone() is not None


async def release_held(session: AsyncSession, email_id: UUID, *, actor: str, reason: str) -> bool:
    """Makes a held email `pending` and due, in one audited commit; False if it is not held or has no content."""
    with translated():
        cursor = await session.execute(query("release_held"), {"email_id": email_id, "actor": actor, "reason": reason})
        return await cursor.fetchone() is not None


async def find_status(session: AsyncSession, email_id: UUID) -> Standing | None:
    """Where an email stands; None if there is none."""
    with translated():
        cursor = await session.execute(query("find_status"), {"email_id": email_id})
        row = await cursor.fetchone()
    return None if row is None else Standing(Status(row[0]), row[1])
