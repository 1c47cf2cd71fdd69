"""Promotions: which of PostgreSQL's timelines the relay is on, and what one that lost commits makes uncertain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import query

DOUBTED: Final = " before the promotion"
"""Follows the owner's name in `locked_by` where a promotion made a lease uncertain."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """Another timeline than the one that was noted last.

    Attributes:
        is_lossy: Commits did not wait for a standby, so that the new primary may lack the last of them.
        lease_count: Leases that are uncertain since.
        message_count: Due emails that may have been published, and whose messages are uncertain since.
    """

    timeline_before: int
    timeline: int
    is_lossy: bool
    lease_count: int = 0
    message_count: int = 0


async def follow_timeline(session: AsyncSession) -> Promotion | None:
    """Notes the timeline; returns the promotion that was found, after its consequences are committed.

    Faults are ours (see `store.connections.translated`).
    """
    with translated():
        if await _fetch(session, "note_timeline"):
            return None
        async with session.transaction():
            return await _begin(session)


async def _begin(session: AsyncSession) -> Promotion | None:
    found = await _fetch(session, "find_noted_timeline")
    before, was_synchronous, timeline = found[0] if found else (0, True, 0)
    is_lossy = timeline > before and not was_synchronous
    await session.execute(query("begin_timeline"), {"is_lossy": is_lossy})
    if timeline == before:
        return None
    leases = messages = 0
    if is_lossy:
        leases = (await session.execute(query("doubt_leases"), {"suffix": DOUBTED})).rowcount
        messages = (await session.execute(query("doubt_messages"))).rowcount
    return Promotion(before, timeline, is_lossy, leases, messages)


async def _fetch(session: AsyncSession, name: str) -> list[tuple[Any, ...]]:
    return await (await session.execute(query(name))).fetchall()
