"""One email's whole story, as the tables have it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from psycopg.rows import dict_row

from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import query

Record = dict[str, Any]


async def find_ids_by_key(session: AsyncSession, tenant_id: str, message_keys: Collection[str]) -> dict[str, UUID]:
    """The emails that hold these message keys, by key; a key that no email holds is left out."""
    if not message_keys:
        return {}
    rows = await _fetch(session, "find_ids_by_key", {"tenant_id": tenant_id, "message_keys": list(message_keys)})
    return {row["message_key"]: row["email_id"] for row in rows}


async def find_email(session: AsyncSession, email_id: UUID) -> Record | None:
    """Everything about it that is not private; None if there is none."""
    rows = await _fetch(session, "find_email", {"email_id": email_id})
    return rows[0] if rows else None


async def list_attempts(session: AsyncSession, email_id: UUID) -> list[Record]:
    """Its attempts, the first one first."""
    return await _fetch(session, "list_attempts", {"email_id": email_id})


async def list_acts(session: AsyncSession, email_id: UUID) -> list[Record]:
    """What people did to it, the first act first."""
    return await _fetch(session, "list_acts", {"email_id": email_id})


async def list_replays_of(session: AsyncSession, email_id: UUID) -> list[Record]:
    """The replays that it was part of, the first one first."""
    return await _fetch(session, "list_replays_of", {"email_id": email_id})


async def reveal_content(session: AsyncSession, email_id: UUID) -> Record | None:
    """What it says and to whom, attachments by name alone; None if it was deleted. Private: put the look on record."""
    rows = await _fetch(session, "reveal_content", {"email_id": email_id})
    if not rows:
        return None
    attachments = await _fetch(session, "list_attachment_names", {"email_id": email_id})
    return {**rows[0], "attachments": attachments}


async def _fetch(session: AsyncSession, name: str, parameters: Mapping[str, Any]) -> list[Record]:
    with translated():
        async with session.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(query(name), parameters)
            return await cursor.fetchall()
