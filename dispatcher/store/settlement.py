"""What a dead worker left in the database: its sessions, and the leases that its ledger did not close."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import ids_within, query


async def terminate_sessions(session: AsyncSession, worker: str) -> int:
    """Ends the sessions of a dead worker; returns how many there were. At zero, nothing of it can commit any more."""
    with translated():
        cursor = await session.execute(query("terminate_sessions"), {"application_name": worker})
        return len(await cursor.fetchall())


async def release_dead(session: AsyncSession, worker: str) -> int:
    """Gives back a dead worker's leases, to be called once its ledger is recorded; returns how many there were."""
    with translated():
        cursor = await session.execute(query("release_dead"), {"worker": worker})
        return len(await cursor.fetchall())


async def find_attempt_bases(session: AsyncSession, email_ids: Collection[UUID]) -> dict[UUID, int]:
    """How many attempts each of these had when it was last replayed; those that never were are left out."""
    if not email_ids:
        return {}
    with translated():
        cursor = await session.execute(query("find_attempt_bases"), ids_within(email_ids))
        return dict(await cursor.fetchall())
