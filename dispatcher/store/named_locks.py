"""Named locks, for work that only one session of the database may do at a time. A lock ends with its session.

A lock is a row that only the dispatcher's roles can write (sql/migrations/0058_named_locks.sql). `named_lock` holds a
lock for one block of code. A session that leads (the relay that publishes, the monitor that alerts) takes a lock with
`acquire`, and holds the lock until the session ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import fetch

RELAY_BLOCKED: Final = "relay_blocked"
"""The lock that the leading relay holds while RabbitMQ blocks its messages because of a memory or disk alarm."""
_POLL_SECONDS: Final = 0.02


@asynccontextmanager
async def named_lock(
    session: AsyncSession, name: str, *, within_seconds: float = 0.0, for_readers: bool = False
) -> AsyncIterator[bool]:
    """Takes the named lock until the block ends. Yields whether this session got the lock.

    Args:
        within_seconds: How long to wait for another session to release the lock.
        for_readers: Whether roles that only read the emails take this lock, too. It is then an advisory lock. While a
            session of any other role has it, every session gets the lock, so use it only to keep an order.
    """
    take, give_back = (_acquire_reading, _release_reading) if for_readers else (acquire, release)
    give_up_at = asyncio.get_running_loop().time() + within_seconds
    is_ours = await take(session, name)
    while not is_ours and asyncio.get_running_loop().time() < give_up_at:
        await asyncio.sleep(_POLL_SECONDS)  # polls, because PostgreSQL does not notify when a lock is released
        is_ours = await take(session, name)
    try:
        yield is_ours
    finally:
        if is_ours and not session.closed:
            await give_back(session, name)


async def acquire(session: AsyncSession, name: str) -> bool:
    """Takes the named lock until the session ends. Returns whether the lock was free, and now belongs to this
    session."""
    return bool(await acquire_free(session, [name]))


async def acquire_free(session: AsyncSession, names: Sequence[str]) -> set[str]:
    """Takes those of the named locks that are free, until the session ends. Returns their names."""
    rows = await fetch(session, "take_named_locks", {"names": list(names)})
    for name in (name for name, is_ours in rows if not is_ours):
        await release(session, name)
    return {name for name, is_ours in rows if is_ours}


async def release(session: AsyncSession, name: str) -> None:
    """Releases a named lock. Idempotent."""
    await fetch(session, "release_named_lock", {"name": name})


async def is_held_by_another(session: AsyncSession, name: str) -> bool:
    """Whether another session holds the named lock."""
    return bool(await fetch(session, "find_other_lock_holder", {"name": name}))


async def _acquire_reading(session: AsyncSession, name: str) -> bool:
    return bool((await fetch(session, "try_reading_lock", {"name": name}))[0][0])


async def _release_reading(session: AsyncSession, name: str) -> None:
    await fetch(session, "release_reading_lock", {"name": name})
