"""Named advisory locks, for work that only one session of the database may do at a time. A lock ends with its session.

`named_lock` holds a lock for one block of code. A session that leads (the relay that publishes, the monitor that
alerts) takes a lock with `acquire`, and holds the lock until the session ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import fetch

RELAY_BLOCKED: Final = "relay_blocked"
"""The lock that the leading relay holds while RabbitMQ blocks its messages because of a memory or disk alarm."""
_POLL_SECONDS: Final = 0.02


@asynccontextmanager
async def named_lock(session: AsyncSession, name: str, *, within_seconds: float = 0.0) -> AsyncIterator[bool]:
    """Takes the named lock until the block ends. Yields whether this session got the lock.

    Args:
        within_seconds: How long to wait for another session to release the lock.
    """
    give_up_at = asyncio.get_running_loop().time() + within_seconds
    is_ours = await acquire(session, name)
    while not is_ours and asyncio.get_running_loop().time() < give_up_at:
        await asyncio.sleep(_POLL_SECONDS)  # polls, because PostgreSQL does not notify when a lock is released
        is_ours = await acquire(session, name)
    try:
        yield is_ours
    finally:
        if is_ours and not session.closed:
            await fetch(session, "release_named_lock", {"name": name})


async def acquire(session: AsyncSession, name: str, *, idle_seconds: float | None = None) -> bool:
    """Takes the named lock until the session ends. Returns whether this session has the lock.

    Do not call this again after it has returned True: a session that takes a lock twice must release it twice.

    Args:
        idle_seconds: PostgreSQL ends the session after this time without a statement, so that a frozen host loses the
            lock. None for no limit.
    """
    if idle_seconds is not None:
        await fetch(session, "set_idle_timeout", {"seconds": idle_seconds})
    return bool((await fetch(session, "try_named_lock", {"name": name}))[0][0])


async def set_shared(session: AsyncSession, name: str, *, is_shared: bool) -> None:
    """Takes or releases a shared named lock, which any number of sessions may hold.

    A session that takes a lock twice must release it twice. So take only a lock that the session does not have, and
    release only a lock that the session has.
    """
    if is_shared:
        await fetch(session, "hold_shared_lock", {"name": name})
    else:
        await fetch(session, "release_shared_lock", {"name": name})


async def is_held_by_another(session: AsyncSession, name: str) -> bool:
    """Whether another session holds the named lock."""
    return bool(await fetch(session, "find_other_lock_holder", {"name": name}))
