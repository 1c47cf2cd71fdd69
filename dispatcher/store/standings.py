"""Where the emails stand of which the DLQ's letters tell, and which letters there have to be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
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
    rows = await _fetch(session, "find_failures", ids_within(set(email_ids)))
    return {row[0]: Standing(row[1], Status(row[2]), row[3], row[4]) for row in rows}


async def discard_dead(session: AsyncSession, email_ids: Collection[UUID], *, actor: str, reason: str) -> set[UUID]:
    """Notes that their dead letters are taken away for good, on record; returns those for which that is news."""
    if not email_ids:
        return set()
    parameters = {**ids_within(set(email_ids)), "actor": actor, "reason": reason}
    return {row[0] for row in await _fetch(session, "discard_dead", parameters)}


async def find_announced(session: AsyncSession) -> dict[UUID, int]:
    """The emails whose dead letter must be on the DLQ, with how many attempts it counts."""
    return dict(await _fetch(session, "find_announced", {}))


async def announce_again(session: AsyncSession, attempts: Mapping[UUID, int]) -> set[UUID]:
    """Has dead letters published again, attempts by id; returns for which emails."""
    if not attempts:
        return set()
    parameters = {**ids_within(attempts), "attempt_counts": [attempts[email_id] for email_id in sorted(attempts)]}
    return {row[0] for row in await _fetch(session, "announce_again", parameters)}


async def audit_orphans(session: AsyncSession, letters: Mapping[UUID, int], *, actor: str, reason: str) -> None:
    """Puts on record that the dead letters of emails that are gone are taken away for good, how many by id."""
    parameters = {"email_ids": list(letters), "letters": list(letters.values()), "actor": actor, "reason": reason}
    with translated():
        await session.execute(query("audit_orphans"), parameters)


async def _fetch(session: AsyncSession, name: str, parameters: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
    with translated():
        cursor = await session.execute(query(name), parameters)
        return await cursor.fetchall()
