"""Reads the facts about a waiting email; `domain.waiting` judges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.domain.waiting import MOST_AHEAD, Facts, Trouble, describe_holder
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession, translated
from dispatcher.store.providers import ProviderState, worst_states
from dispatcher.store.queries import ids_within, query


async def find_facts(session: AsyncSession, email_id: UUID, *, most_ahead: int = MOST_AHEAD) -> Facts | None:
    """The facts about an email; None if it is finished or does not exist.

    Args:
        most_ahead: The most emails ahead of it that are counted; 0 counts none.
    """
    rows = await _fetch(session, "find_wait", {"email_id": email_id, "most_ahead": most_ahead})
    if not rows:
        return None
    now, status, *rest = rows[0]
    troubles = await find_troubles(session)
    ceilings: dict[str, float] = dict(await _fetch(session, "list_ceilings", {}))
    values: tuple[Any, ...] = (now, Status(status), *rest, troubles, ceilings)
    return Facts(*values)


async def find_troubles(session: AsyncSession) -> list[Trouble]:
    """The providers that some worker cannot use now, by name."""
    return worst_states(ProviderState(*row) for row in await _fetch(session, "list_provider_states", {}))


async def find_holders(session: AsyncSession, email_id: UUID) -> list[str]:
    """Sessions that may hold a lock on the email's row for longer than a batched statement waits.

    Locks the row for an instant to find out, so a role that may only read gets an empty list.
    """
    if not (await _fetch(session, "may_lock", {}))[0][0]:
        return []
    if not await _fetch(session, "find_locked", ids_within([email_id])):
        return []
    rows = await _fetch(session, "find_holders", {"age_seconds": BATCH_LOCK_SECONDS})
    return [describe_holder(*row) for row in rows]


async def _fetch(session: AsyncSession, name: str, parameters: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
    with translated():
        cursor = await session.execute(query(name), parameters)
        return await cursor.fetchall()
