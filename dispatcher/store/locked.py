"""Emails whose rows somebody else's transaction holds: they wait alone, and the others go on without them.

A batched statement waits for every row in it, so one row that stays locked (a `psql` left open in the middle of a
transaction, say) would hold up all. Nothing is asked while nothing is locked. Where a statement has waited in vain, one
look tells which of its emails are locked; they are remembered, and looked at alone before they are in a batch again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar
from uuid import UUID

from dispatcher.errors import StoreBusy
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession, translated
from dispatcher.store.queries import ids_within, query
from dispatcher.telemetry.log import get_log

REMEMBERED_SECONDS: Final = 60.0
"""Since it was last seen locked; whoever has an email in hand looks far more often."""
MOST_NAMED: Final = 5
"""In one log line; somebody may have locked thousands."""

T = TypeVar("T")


class LockedRows:
    """What one process knows of locked emails."""

    def __init__(self, open_session: Callable[[], AbstractAsyncContextManager[AsyncSession]]) -> None:
        self._open_session = open_session
        self._seen_at: dict[UUID, float] = {}
        self._log = get_log()

    def __contains__(self, email_id: UUID) -> bool:
        return email_id in self._seen_at

    def __len__(self) -> int:
        return len(self._seen_at)

    async def around(
        self, email_ids: Iterable[UUID], execute: Callable[[set[UUID]], Awaitable[T]]
    ) -> tuple[T | None, set[UUID]]:
        """Executes a batched statement for these emails without those that are locked.

        Returns:
            Its answer, None if all of them are locked; and the emails that it was not executed for.

        Raises:
            StoreBusy: what it waited for is none of these rows, and nothing was committed.
        """
        asked = set(email_ids)
        locked = await self.among(asked)
        if asked and locked == asked:
            return None, locked
        try:
            return await execute(asked - locked), locked
        except StoreBusy:
            locked |= await self.among(asked - locked, is_busy=True)
        return (await execute(asked - locked) if asked > locked else None), locked

    async def among(self, email_ids: Collection[UUID], *, is_busy: bool = False) -> set[UUID]:
        """Which of these are locked now, of those that were when we last looked.

        Args:
            is_busy: A statement has waited for them in vain: look at all of them.
        """
        if not (self._seen_at or is_busy):
            return set()
        self._forget_old()
        asked = set(email_ids) if is_busy else self._seen_at.keys() & set(email_ids)
        if not asked:
            return set()
        locked = {row[0] for row in await self._fetch("find_locked", ids_within(asked))}
        new = locked - self._seen_at.keys()
        for email_id in asked - locked:
            self._seen_at.pop(email_id, None)
        self._seen_at |= dict.fromkeys(locked, time.monotonic())
        if new:
            await self._tell(new)
        return locked

    def _forget_old(self) -> None:
        before = time.monotonic() - REMEMBERED_SECONDS
        for email_id in [email_id for email_id, seen_at in self._seen_at.items() if seen_at < before]:
            del self._seen_at[email_id]

    async def _tell(self, email_ids: set[UUID]) -> None:
        rows = await self._fetch("find_holders", {"age_seconds": BATCH_LOCK_SECONDS})
        fields = {
            "count": len(email_ids),
            "email_ids": [str(email_id) for email_id in sorted(email_ids)[:MOST_NAMED]],
            "held_by": [_holder(*row) for row in rows],
        }
        # A commit that waits for a standby keeps its rows locked, and no operator has to end its session.
        if rows and all(is_committing for *_, is_committing in rows):
            self._log.warning("store.commits_waiting", **fields)
        else:
            self._log.warning("email.locked", **fields)

    async def _fetch(self, name: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        async with self._open_session() as session:
            with translated():
                cursor = await session.execute(query(name), parameters)
                return await cursor.fetchall()


def _holder(
    pid: int | None, application: str | None, state: str | None, age_seconds: float | None, is_committing: bool
) -> str:
    if pid is None:
        return "a prepared transaction (see pg_prepared_xacts)"
    age = "" if age_seconds is None else f", its transaction {age_seconds:.0f} s old"
    waits = ", its commit waits for a synchronous standby" if is_committing else ""
    return f"pid {pid} ({application or 'unnamed'}), {state or 'of another user'}{age}{waits}"
