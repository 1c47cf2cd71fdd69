"""Detects that a standby was promoted to the primary, by PostgreSQL's timeline: a number that each promotion changes.

After a promotion that may have lost commits, marks leases and messages as uncertain: their emails may already have been
sent.
"""

from __future__ import annotations

import time
from typing import Final
from uuid import UUID

from dispatcher.domain.values import dataclass
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import ids_within, query
from dispatcher.store.statements import fetch

UNCERTAIN_SUFFIX: Final = " before the promotion"
"""Appended to the owner's name in `locked_by` if a promotion made the lease uncertain."""


BATCH: Final = 10_000
"""Due emails per statement. Such a statement takes about a second; PostgreSQL would cancel it after 30 seconds."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """The promotion of a standby, which changes PostgreSQL's timeline.

    Attributes:
        is_lossy: Whether the new primary might lack the last commits, because commits did not wait for a standby.
    """

    previous_timeline: int
    timeline: int
    is_lossy: bool
    lease_count: int = 0
    message_count: int = 0


class Timeline:
    """Records PostgreSQL's timeline on one session, and detects a promotion.

    Attributes:
        state: The snapshot of a statement of the session after the last record, and `synchronous_standby_names`. If
            None, `follow` finds out whether anything has changed since the last record.
        commit_seconds: How long the last record took, with its durable commit; 0 if there was none yet.
    """

    def __init__(self, session: AsyncSession) -> None:
        self.state: str | None = None
        self.commit_seconds = 0.0
        self._session = session
        self._quiet_state = ""  # the state as long as the last record is still right

    async def follow(self, *, batch: int = BATCH) -> Promotion | None:
        """Returns the promotion since the last call; None if there was none.

        Stores the timeline for the next call. If the promotion may have lost commits, also marks the leases and
        messages that became uncertain, in the same transaction. Errors are translated (see
        `store.connections.translated`).
        """
        state, self.state = self.state, None
        if state == self._quiet_state:
            return None
        began_at = time.monotonic()
        promotion = None
        with translated():
            if noted := await fetch(self._session, "note_timeline", {"quiet_state": self._quiet_state}):
                ((snapshot, standbys, transaction_id),) = noted
                if transaction_id is None:
                    return None
                # No other transaction was open, and none began before this one: the record covers all that was written.
                if snapshot == f"{transaction_id}:{transaction_id}:":
                    self._quiet_state = f"{transaction_id + 1}:{transaction_id + 1}: {standbys}"
            else:
                async with self._session.transaction():
                    promotion = await _begin(self._session, batch)
        self.commit_seconds = time.monotonic() - began_at
        return promotion


async def _begin(session: AsyncSession, batch: int) -> Promotion | None:
    found = await fetch(session, "find_noted_timeline")
    before, was_synchronous, timeline = found[0] if found else (0, True, 0)
    is_lossy = timeline > before and not was_synchronous
    await session.execute(query("begin_timeline"), {"is_lossy": is_lossy})
    if timeline == before:
        return None
    leases = messages = 0
    if is_lossy:
        leases = (await session.execute(query("mark_leases_uncertain"), {"suffix": UNCERTAIN_SUFFIX})).rowcount
        messages = await _mark_messages_uncertain(session, batch)
    return Promotion(before, timeline, is_lossy, leases, messages)


async def _mark_messages_uncertain(session: AsyncSession, batch: int) -> int:
    """Marks as uncertain the messages that may have been published before the promotion. Returns their number.

    PostgreSQL has no record of the publishing, because the promotion lost the last commits.
    """
    count, after = 0, UUID(int=0)
    while rows := await fetch(session, "find_uncertain_messages", {"after": after, "limit": batch}):
        ids = [row[0] for row in rows]
        after = ids[-1]
        count += (await session.execute(query("mark_messages_uncertain"), ids_within(ids))).rowcount
    return count
