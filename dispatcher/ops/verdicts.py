"""What a person decides about held emails: it did arrive, or it shall be sent again."""

from __future__ import annotations

from enum import StrEnum
from typing import Final
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.ops.acts import Act
from dispatcher.store import failures
from dispatcher.store.connections import AsyncSession


class Verdict(StrEnum):
    """What became of a decision about one email."""

    CONFIRMED = "confirmed"
    """It was held and is `sent` now."""
    RELEASED = "released"
    """It was held and is `pending` and due now."""
    ALREADY_SENT = "already_sent"
    """Nothing was changed: it is `sent`."""
    UNDER_WAY = "under_way"
    """Nothing was changed: it is `pending` or `sending`."""
    FAILED = "failed"
    """Nothing was changed: it is `failed`, which a replay is for."""
    CONTENT_PRUNED = "content_pruned"
    """Nothing was changed: it is held, and what would have to be sent was deleted."""
    UNKNOWN = "unknown"
    """There is no such email."""


_VERDICTS: Final = {
    Status.SENT: Verdict.ALREADY_SENT,
    Status.PENDING: Verdict.UNDER_WAY,
    Status.SENDING: Verdict.UNDER_WAY,
    Status.FAILED: Verdict.FAILED,
    Status.HELD: Verdict.CONTENT_PRUNED,
}


async def confirm(session: AsyncSession, email_id: UUID, act: Act) -> Verdict:
    """Takes a person's word that a held email arrived; a second call is harmless. Its dead letter is stale then."""
    if await failures.confirm_held(session, email_id, actor=act.actor, reason=act.reason):
        return Verdict.CONFIRMED
    return await _verdict(session, email_id)


async def release(session: AsyncSession, email_id: UUID, act: Act) -> Verdict:
    """Has a held email sent again, arrived or not; a second call is harmless. Its dead letter is stale then."""
    if await failures.release_held(session, email_id, actor=act.actor, reason=act.reason):
        return Verdict.RELEASED
    return await _verdict(session, email_id)


async def _verdict(session: AsyncSession, email_id: UUID) -> Verdict:
    status = await failures.find_status(session, email_id)
    return Verdict.UNKNOWN if status is None else _VERDICTS[status]
