"""Cancels and reschedules pending and waiting emails, and selects them by a filter."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import fetch


@dataclass(frozen=True, slots=True)
class UnsentFilter:
    """A filter for pending and waiting emails; a field that is None does not filter.

    Attributes:
        status: `pending` or `waiting`.
        older_than_seconds: Only emails that were enqueued more than this many seconds ago.
        newer_than_seconds: Only emails that were enqueued less than this many seconds ago.
        tag: One of the email's tags.
        channel: `email`, `sms`, or a channel that a package adds.
        email_ids: Only these emails.
    """

    status: Status | None = None
    tenant_id: str | None = None
    lane: str | None = None
    correlation_id: str | None = None
    older_than_seconds: float | None = None
    newer_than_seconds: float | None = None
    email_ids: tuple[UUID, ...] | None = None
    tag: str | None = None
    channel: str | None = None

    @property
    def filters(self) -> dict[str, Any]:
        """The filters that are set, by name, without `email_ids`."""
        return {name: value for name, value in asdict(self).items() if name != "email_ids" and value is not None}

    @property
    def parameters(self) -> dict[str, Any]:
        """The filter as parameters of the statements `count_unsent` and `find_unsent_ids`."""
        return {**asdict(self), "email_ids": None if self.email_ids is None else list(self.email_ids)}


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether one email could be cancelled or rescheduled.

    Attributes:
        status: The status before the change.
        is_changed: Whether the email was cancelled or rescheduled.
        expires_first: Whether the email was not rescheduled because it expires before the new time.
    """

    email_id: UUID
    status: Status
    is_changed: bool
    expires_first: bool


async def cancel_emails(
    session: AsyncSession, email_ids: Collection[UUID], *, tenant_id: str | None, actor: str, reason: str
) -> list[Decision]:
    """Cancels the given emails that are pending or waiting, and adds audit records, in one commit.

    Returns a decision for each email that exists.

    Args:
        tenant_id: Only emails of this tenant; None for emails of all tenants.

    Raises:
        StoreBusy: Another transaction holds a lock on one of the rows. Nothing was changed.
    """
    if not email_ids:
        return []
    parameters = {**ids_within(set(email_ids)), "tenant_id": tenant_id, "actor": actor, "reason": reason}
    return await fetch(session, "cancel_emails", parameters, into=Decision)


async def reschedule_emails(
    session: AsyncSession,
    email_ids: Collection[UUID],
    send_at: datetime,
    *,
    tenant_id: str | None,
    actor: str,
    reason: str,
) -> list[Decision]:
    """As `cancel_emails`, but the emails wait until `send_at` instead. If `send_at` has passed, the emails are due
    now."""
    if not email_ids:
        return []
    ids = ids_within(set(email_ids))
    parameters = {**ids, "send_at": send_at, "tenant_id": tenant_id, "actor": actor, "reason": reason}
    return await fetch(session, "reschedule_emails", parameters, into=Decision)


async def count_unsent(
    session: AsyncSession, selected: UnsentFilter, *, sample: int, most: int | None = None
) -> dict[Status, tuple[int, list[UUID]]]:
    """The selected emails by status: their number and the first `sample` ids.

    Args:
        most: Count at most this many emails.
    """
    rows = await fetch(session, "count_unsent", {**selected.parameters, "sample": sample, "most": most})
    return {Status(status): (count, ids) for status, count, ids in rows}


async def find_unsent_ids(session: AsyncSession, selected: UnsentFilter, *, most: int | None = None) -> list[UUID]:
    """The ids of the selected emails, oldest first; at most `most` ids."""
    return [row[0] for row in await fetch(session, "find_unsent_ids", {**selected.parameters, "most": most})]
