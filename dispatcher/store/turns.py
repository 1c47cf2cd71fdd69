"""Turns: what only one session may do at a time, by PostgreSQL's advisory locks, which end with their session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import query

_POLL_SECONDS: Final = 0.02


@asynccontextmanager
async def turn(session: AsyncSession, name: str, *, within_seconds: float = 0.0) -> AsyncIterator[bool]:
    """Whether it is our turn, for the block; another's may be waited out."""
    give_up_at = asyncio.get_running_loop().time() + within_seconds
    is_ours = await _take(session, name)
    while not is_ours and asyncio.get_running_loop().time() < give_up_at:
        await asyncio.sleep(_POLL_SECONDS)  # PostgreSQL announces no lock's end
        is_ours = await _take(session, name)
    try:
        yield is_ours
    finally:
        if is_ours and not session.closed:
            with translated():
                await session.execute(query("end_turn"), {"name": name})


async def _take(session: AsyncSession, name: str) -> bool:
    with translated():
        cursor = await session.execute(query("try_turn"), {"name": name})
        row = await cursor.fetchone()
    return bool(row and row[0])
