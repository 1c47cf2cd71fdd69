"""Cancels or reschedules emails that are not sent yet, for an operator or the application that enqueued them.

One conditional update of the email's row decides. If the update finds the email pending or waiting, it changes the
email, and no worker can lease the email any more. Otherwise it is too late: a worker has leased the email, or its
result is known.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.errors import StoreBusy
from dispatcher.ops.acts import Act
from dispatcher.store import unsent
from dispatcher.store.connections import AsyncSession
from dispatcher.store.unsent import Decision

BATCH: Final = 500
"""Emails per commit. Few, because a worker that leases one of these emails waits for the commit."""

SAMPLE: Final = 5
"""How many ids a preview shows per status."""


class Change(StrEnum):
    """What cancelling or rescheduling did to one email."""

    CANCELLED = "cancelled"
    """The email will not be sent."""
    RESCHEDULED = "rescheduled"
    """The email waits until the new time."""
    ALREADY_CANCELLED = "already_cancelled"
    """Nothing changed: the email was cancelled before, or has expired."""
    TOO_LATE = "too_late"
    """Nothing changed: the email is leased, sent, failed or held, or an event has proven that a provider accepted the
    email. For a reschedule, also: the email is cancelled."""
    EXPIRES_FIRST = "expires_first"
    """Nothing changed: the email expires before the new time."""
    LOCKED = "locked"
    """Nothing changed: another transaction holds a lock on the email's row."""
    UNKNOWN = "unknown"
    """There is no such email."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The result of cancelling or rescheduling one email.

    Attributes:
        status: The email's status before the call; None if the email is unknown or locked.
    """

    email_id: UUID
    change: Change
    status: Status | None


ChangeMany = Callable[[AsyncSession, Sequence[UUID]], Awaitable[list[Changed]]]


async def cancel(
    session: AsyncSession, email_ids: Collection[UUID], act: Act, *, tenant_id: str | None = None
) -> list[Changed]:
    """Cancels emails that are pending or waiting, in one commit; returns a result per id, in order. Idempotent.

    Args:
        tenant_id: Only emails of this tenant; the result for other emails is `UNKNOWN`. None for all tenants.
    """
    decided = await unsent.cancel_emails(session, email_ids, tenant_id=tenant_id, actor=act.actor, reason=act.reason)
    return _results(email_ids, decided, Change.CANCELLED, Change.ALREADY_CANCELLED)


async def reschedule(
    session: AsyncSession, email_ids: Collection[UUID], send_at: datetime, act: Act, *, tenant_id: str | None = None
) -> list[Changed]:
    """Like `cancel`, but makes the pending and waiting emails wait until `send_at`. If `send_at` is in the past, the
    emails become due immediately."""
    decided = await unsent.reschedule_emails(
        session, email_ids, send_at, tenant_id=tenant_id, actor=act.actor, reason=act.reason
    )
    return _results(email_ids, decided, Change.RESCHEDULED, Change.TOO_LATE)


def _results(
    email_ids: Collection[UUID], decided: Collection[Decision], changed: Change, if_cancelled: Change
) -> list[Changed]:
    by_id = {each.email_id: each for each in decided}
    return [_result(email_id, by_id.get(email_id), changed, if_cancelled) for email_id in dict.fromkeys(email_ids)]


def _result(email_id: UUID, decided: Decision | None, changed: Change, if_cancelled: Change) -> Changed:
    if decided is None:
        return Changed(email_id, Change.UNKNOWN, None)
    if decided.is_changed:
        change = changed
    elif decided.expires_first:
        change = Change.EXPIRES_FIRST
    else:
        change = if_cancelled if decided.status is Status.CANCELLED else Change.TOO_LATE
    return Changed(email_id, change, decided.status)


async def change_all(
    session: AsyncSession, email_ids: Sequence[UUID], change: ChangeMany
) -> AsyncIterator[list[Changed]]:
    """Applies `change` to any number of emails in batches, each in one commit; yields the results of each batch."""
    for first in range(0, len(email_ids), BATCH):
        yield await _change_free(session, email_ids[first : first + BATCH], change)


async def _change_free(session: AsyncSession, email_ids: Sequence[UUID], change: ChangeMany) -> list[Changed]:
    """Applies `change` to all emails of a batch whose rows are not locked.

    If a row is locked, `change` changes nothing. So this function splits the batch until it has found the locked rows.
    """
    try:
        return await change(session, email_ids)
    except StoreBusy:
        if len(email_ids) == 1:
            return [Changed(email_ids[0], Change.LOCKED, None)]
    half = len(email_ids) // 2
    first = await _change_free(session, email_ids[:half], change)
    return first + await _change_free(session, email_ids[half:], change)
