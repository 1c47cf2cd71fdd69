"""Named locks, for work that only one session of the database may do at a time. A lock ends with its session.

A lock is a row of the table named_lock, which only the dispatcher's roles can write. `named_lock` holds a lock for one
block of code. A session that leads (the relay that publishes, the monitor that alerts) takes a lock with `acquire`, and
holds the lock until the session ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import Source, statement

RELAY_BLOCKED: Final = "relay_blocked"
"""The lock that the leading relay holds while RabbitMQ blocks its messages because of a memory or disk alarm."""
_POLL_SECONDS: Final = 0.02


@asynccontextmanager
async def named_lock(
    session: AsyncSession, name: str, *, within_seconds: float = 0.0, for_readers: bool = False
) -> AsyncIterator[bool]:
    """Takes the named lock until the block ends, or waits up to `within_seconds` for it. Yields whether this session
    got it.

    With `for_readers`, roles that only read the emails can take the lock, too. It is then an advisory lock. While a
    session of any other role has it, every session gets the lock, so use it only to keep an order.
    """
    take, give_back = (try_reading_lock, release_reading_lock) if for_readers else (acquire, release_named_lock)
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
    """As `acquire_free`, for one lock. Returns whether the lock was free, and now belongs to this session."""
    return bool(await acquire_free(session, [name]))


async def acquire_free(session: AsyncSession, names: Sequence[str]) -> set[str]:
    """Takes those of the named locks that are free, until the session ends. Returns their names."""
    return {name for name, is_ours in (await take_named_locks(session, names)).items() if is_ours}


@statement
async def release_named_lock(source: Source, name: str) -> None: ...
@statement
async def is_held_by_another(source: Source, name: str) -> bool: ...
@statement
async def try_reading_lock(source: Source, name: str) -> bool: ...
@statement
async def release_reading_lock(source: Source, name: str) -> None: ...
@statement
async def take_named_locks(source: Source, names: Sequence[str]) -> dict[str, bool]: ...
