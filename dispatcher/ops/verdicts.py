"""Resolves held emails for an operator: confirms that an email arrived, or releases the email to be sent again."""

from __future__ import annotations

from enum import StrEnum
from typing import Final
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.ops.acts import Act
from dispatcher.store import failures
from dispatcher.store.connections import AsyncSession


class Verdict(StrEnum):
    """The result of confirming or releasing one email."""

    CONFIRMED = "confirmed"
    """The email was held and is now `sent`."""
    RELEASED = "released"
    """The email was held and is now `pending` and due."""
    ALREADY_SENT = "already_sent"
    """Nothing changed: the email is `sent`."""
    UNDER_WAY = "under_way"
    """Nothing changed: the email is `pending`, `waiting` or `sending`."""
    CANCELLED = "cancelled"
    """Nothing changed: the email is `cancelled`."""
    EXPIRED = "expired"
    """Nothing changed: the email has expired. The relay is about to cancel it."""
    FAILED = "failed"
    """Nothing changed: the email is `failed`; use a replay."""
    CONTENT_PRUNED = "content_pruned"
    """Nothing changed: the email is held, and its content was deleted."""
    UNKNOWN = "unknown"
    """There is no such email."""


_VERDICTS: Final = {
    Status.SENT: Verdict.ALREADY_SENT,
    Status.PENDING: Verdict.UNDER_WAY,
    Status.WAITING: Verdict.UNDER_WAY,
    Status.SENDING: Verdict.UNDER_WAY,
    Status.CANCELLED: Verdict.CANCELLED,
    Status.FAILED: Verdict.FAILED,
    Status.HELD: Verdict.CONTENT_PRUNED,
}


async def confirm(session: AsyncSession, email_id: UUID, act: Act) -> Verdict:
    """Marks a held email as sent, because an operator knows that the email arrived. Its dead letter becomes stale.
    Idempotent."""
    if await failures.confirm_held(session, email_id, actor=act.actor, reason=act.reason):
        return Verdict.CONFIRMED
    return await _verdict(session, email_id)


async def release(session: AsyncSession, email_id: UUID, act: Act) -> Verdict:
    """Makes a held email pending, so that it is sent again. If the email had already arrived, the recipient gets it
    twice. Its dead letter becomes stale. Idempotent."""
    if await failures.release_held(session, email_id, actor=act.actor, reason=act.reason):
        return Verdict.RELEASED
    return await _verdict(session, email_id)


async def _verdict(session: AsyncSession, email_id: UUID) -> Verdict:
    found = await failures.find_status(session, email_id)
    if found is None:
        return Verdict.UNKNOWN
    status, is_expired = found
    return Verdict.EXPIRED if status is Status.HELD and is_expired else _VERDICTS[status]
