"""Failed and held emails, as operators and the DLQ's letters ask for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import ids_within, query


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a dead letter's email stands now.

    Attributes:
        attempt_count: Together with the id it names one failure: every later one has more attempts.
        is_discarded: A person took its letter away for good.
    """

    message_key: str
    status: Status
    attempt_count: int
    is_discarded: bool


async def find_failures(session: AsyncSession, email_ids: Collection[UUID]) -> dict[UUID, Standing]:
    """Where emails stand, by id; an id without a row is left out."""
    if not email_ids:
        return {}
    with translated():
        cursor = await session.execute(query("find_failures"), ids_within(set(email_ids)))
        rows = await cursor.fetchall()
    return {row[0]: Standing(row[1], Status(row[2]), row[3], row[4]) for row in rows}
