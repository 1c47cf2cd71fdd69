"""Turns: what only one session of the database does at a time, by a named lock that ends with its session.

`turn` is for one piece of work. A session that leads (the relay that publishes, the monitor that alerts) takes its turn
with `take`, and keeps it until it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import fetch

_POLL_SECONDS: Final = 0.02


@asynccontextmanager
async def turn(session: AsyncSession, name: str, *, within_seconds: float = 0.0) -> AsyncIterator[bool]:
    """Whether it is our turn, for the block; another's may be waited out."""
    give_up_at = asyncio.get_running_loop().time() + within_seconds
    is_ours = await take(session, name)
    while not is_ours and asyncio.get_running_loop().time() < give_up_at:
        await asyncio.sleep(_POLL_SECONDS)  # PostgreSQL announces no lock's end
        is_ours = await take(session, name)
    try:
        yield is_ours
    finally:
        if is_ours and not session.closed:
            await fetch(session, "end_turn", {"name": name})


async def take(session: AsyncSession, name: str, *, idle_seconds: float | None = None) -> bool:
    """Whether this session has the turn from now on. Call it once.

    Args:
        idle_seconds: PostgreSQL ends the session when it says nothing for so long: its host is frozen, and would keep
            the turn until it goes on.
    """
    if idle_seconds is not None:
        await fetch(session, "end_if_idle", {"seconds": idle_seconds})
    return bool((await fetch(session, "try_turn", {"name": name}))[0][0])


async def share(session: AsyncSession, name: str, *, is_shared: bool) -> None:
    """Says, or takes back, something that any number of sessions may say. Call it only when that changes."""
    if is_shared:
        await fetch(session, "share_turn", {"name": name})
    else:
        await fetch(session, "end_shared_turn", {"name": name})


async def is_shared_by_another(session: AsyncSession, name: str) -> bool:
    """Whether another session says it."""
    return bool(await fetch(session, "find_shared_turn", {"name": name}))
