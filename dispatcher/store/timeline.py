"""Promotions: which of PostgreSQL's timelines the relay is on, and what one that lost commits makes uncertain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import ids_within, query
from dispatcher.store.statements import fetch

DOUBTED: Final = " before the promotion"
"""Follows the owner's name in `locked_by` where a promotion made a lease uncertain."""


BATCH: Final = 10_000
"""Due emails per statement. This many take about a second; PostgreSQL cancels our statements after 30 seconds."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Another timeline than the one that was noted last.

    Attributes:
        is_lossy: Commits did not wait for a standby, so that the new primary may lack the last of them.
        lease_count: Leases that are uncertain since.
        message_count: Due emails that may have been published, and whose messages are uncertain since.
    """

    previous_timeline: int
    timeline: int
    is_lossy: bool
    lease_count: int = 0
    message_count: int = 0


async def follow_timeline(session: AsyncSession, *, batch: int = BATCH) -> Promotion | None:
    """Notes the timeline; returns the promotion that was found, after its consequences are committed.

    Faults are ours (see `store.connections.translated`).

    Args:
        batch: The most due emails that one statement changes.
    """
    with translated():
        if await fetch(session, "note_timeline"):
            return None
        async with session.transaction():
            return await _begin(session, batch)


async def _begin(session: AsyncSession, batch: int) -> Promotion | None:
    found = await fetch(session, "find_noted_timeline")
    before, was_synchronous, timeline = found[0] if found else (0, True, 0)
    is_lossy = timeline > before and not was_synchronous
    await session.execute(query("begin_timeline"), {"is_lossy": is_lossy})
    if timeline == before:
        return None
    leases = messages = 0
    if is_lossy:
        leases = (await session.execute(query("doubt_leases"), {"suffix": DOUBTED})).rowcount
        messages = await _doubt_messages(session, batch)
    return Promotion(before, timeline, is_lossy, leases, messages)


async def _doubt_messages(session: AsyncSession, batch: int) -> int:
    """Marks the messages of all due emails as doubtful; returns their number."""
    count, after = 0, UUID(int=0)
    while rows := await fetch(session, "find_doubted", {"after": after, "limit": batch}):
        ids = [row[0] for row in rows]
        after = ids[-1]
        count += (await session.execute(query("doubt_messages"), ids_within(ids))).rowcount
    return count
