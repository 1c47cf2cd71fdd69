"""Finds and groups failed and held emails, and confirms, releases or discards them, for operators.

Also finds the emails that must have a dead letter on the DLQ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import orjson

from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass
from dispatcher.store.connections import AsyncSession
from dispatcher.store.queries import ids_with, ids_within
from dispatcher.store.statements import fetch, from_rows

CAUSES: Final = ("cause", "domain", "tenant")
"""What `group_dead` can group by. A cause is an error type and a provider. In groups by domain, an email counts once
for each domain of its recipients."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter for failed and held emails; a field that is None does not filter.

    Attributes:
        status: `failed` or `held`.
        text: A part of the error text; case is ignored.
        older_than_seconds: Only emails that were enqueued more than this many seconds ago.
        newer_than_seconds: Only emails that were enqueued less than this many seconds ago.
        email_ids: Only these emails.
        discarded: True for emails whose dead letter an operator discarded, False (the default) for all others.
        tag: One of the email's tags. Emails whose content was deleted have no tags.
        channel: `email`, `sms`, or a channel that a package adds.
    """

    status: Status | None = None
    error_type: str | None = None
    provider: str | None = None
    tenant_id: str | None = None
    text: str | None = None
    older_than_seconds: float | None = None
    newer_than_seconds: float | None = None
    email_ids: tuple[UUID, ...] | None = None
    discarded: bool | None = False
    tag: str | None = None
    channel: str | None = None

    @property
    def filters(self) -> dict[str, Any]:
        """The filters that are set, by name, without `email_ids`."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name != "email_ids" and value is not None and (name, value) != ("discarded", False)
        }

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments of the SQL function `find_dead_emails`."""
        ids = None if self.email_ids is None else list(self.email_ids)
        return {**asdict(self), "status": self.status and self.status.value, "email_ids": ids}


@dataclass(frozen=True, slots=True)
class DeadEmail:
    """A failed or held email, without private data.

    Attributes:
        is_letter_due: Whether the relay must still publish the email's dead letter.
        discarded_at: When an operator discarded the email's dead letter; None if no operator did.
    """

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    status: Status
    error_type: str | None
    error: str | None
    attempt_count: int
    provider: str | None
    created_at: datetime
    is_letter_due: bool
    discarded_at: datetime | None


@dataclass(frozen=True, slots=True)
class Group:
    """The failed and held emails that share a value of a property, such as the same error type.

    Attributes:
        emails: The number of these emails.
        oldest_at: When the oldest of these emails was enqueued.
        newest_at: When the newest of these emails was enqueued.
    """

    value: str
    emails: int
    oldest_at: datetime
    newest_at: datetime


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Failed and held emails with the same cause, or with the same value of a property.

    Attributes:
        keys: In groups by cause: the error type and the provider. In other groups: the domain or the tenant. A value
            that is not known is None.
        emails: The number of emails in this group.
        held: How many of these emails are held.
        oldest_at: When the oldest of these emails was enqueued.
        sample_id: The newest of these emails.
        sample_error: The last error of the newest email.
        emails_in_all: How many emails `group_dead` has grouped, including emails of groups that it does not return. The
            same in each group.
    """

    keys: Sequence[str | None]
    emails: int
    held: int
    oldest_at: datetime
    newest_at: datetime
    sample_id: UUID
    sample_error: str | None
    emails_in_all: int


@dataclass(frozen=True, slots=True)
class HeldEvidence:
    """A held email with everything that can show whether the email arrived, without private data.

    Attributes:
        error: Why the email is held.
        discarded_at: When an operator discarded the email's dead letter; None if no operator did.
        has_content: Whether the email can be sent again.
        worker: The worker of the last recorded attempt. None if no attempt was recorded, because the worker or its host
            was lost.
        events: The kinds of events that providers reported about the email.
    """

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    error_type: str | None
    error: str | None
    provider: str | None
    attempt_count: int
    created_at: datetime
    discarded_at: datetime | None
    provider_message_id: str | None
    expires_at: datetime | None
    has_content: bool
    worker: str | None
    started_at: datetime | None
    finished_at: datetime | None
    outcome: str | None
    provider_code: str | None
    events: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class HeldEmail:
    """A held email, without private data."""

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    provider: str | None
    attempt_count: int
    last_error: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class DeadLetterEmail:
    """The current state of the email that a dead letter is about.

    Attributes:
        attempt_count: The number of attempts. Each time the email fails, this number is higher, so it shows which
            failure a dead letter is about.
        is_discarded: Whether an operator discarded the email's dead letter.
    """

    message_key: str
    status: Status
    attempt_count: int
    is_discarded: bool


async def list_dead(
    session: AsyncSession, selection: Selection, *, before: UUID | None = None, limit: int = 50
) -> tuple[list[DeadEmail], int]:
    """A page of failed and held emails, newest first, and the number of emails on this page and all later pages.

    Args:
        before: Only emails with a lower id than this; None for the first page.
    """
    rows = await fetch(session, "list_dead", {**selection.parameters, "before": before, "limit": limit})
    return from_rows(DeadEmail, [row[:-1] for row in rows]), rows[0][-1] if rows else 0


async def count_dead(session: AsyncSession, selection: Selection, by: str) -> list[Group]:
    """The selected emails, grouped by a property; largest group first.

    Args:
        by: `error_type`, `provider`, `tenant`, `status`, `domain` or `error`.
    """
    return await fetch(session, "count_dead", {**selection.parameters, "by": by}, into=Group)


async def list_dead_page(
    session: AsyncSession, selection: Selection, *, before: UUID | None = None, limit: int = 50
) -> list[DeadEmail]:
    """A page of failed and held emails, newest first. Fast, however many emails are selected.

    Args:
        before: Only emails with a lower id than this; None for the first page.
    """
    parameters = {**selection.parameters, "before": before, "limit": limit}
    return await fetch(session, "list_dead_page", parameters, into=DeadEmail)


async def group_dead(
    session: AsyncSession, selection: Selection, by: str, *, limit: int, groups: int
) -> list[DeadGroup]:
    """Groups the newest `limit` selected emails. Returns the largest groups, largest first.

    Args:
        by: One of `CAUSES`.
        groups: The most groups to return.
    """
    parameters = {**selection.parameters, "by": by, "limit": limit, "groups": groups}
    return await fetch(session, "group_dead", parameters, into=DeadGroup)


async def preview_dead(
    session: AsyncSession, selection: Selection, *, include_held: bool, sample: int
) -> dict[str, tuple[int, list[UUID]]]:
    """What a replay would do: by outcome (such as `replayed` or `expired`), the number of emails and their first ids.

    Args:
        include_held: Whether the replay would include emails that may have arrived (held, or failed after an uncertain
            attempt).
        sample: The most ids to return for each outcome.
    """
    parameters = {**selection.parameters, "include_held": include_held, "sample": sample}
    return {outcome: (count, ids) for outcome, count, ids in await fetch(session, "preview_dead", parameters)}


async def find_dead_ids(session: AsyncSession, selection: Selection) -> list[UUID]:
    """The ids of all selected emails, oldest first."""
    return [row[0] for row in await fetch(session, "find_dead_ids", selection.parameters)]


async def find_known_ids(session: AsyncSession, email_ids: Collection[UUID]) -> set[UUID]:
    """The given ids for which an email exists."""
    if not email_ids:
        return set()
    return {row[0] for row in await fetch(session, "find_known_ids", ids_within(set(email_ids)))}


async def audit(
    session: AsyncSession,
    action: str,
    *,
    actor: str,
    reason: str | None,
    email_id: UUID | None = None,
    detail: Mapping[str, Any] | None = None,
) -> None:
    """Adds an audit record. Only for actions that change no email: statements that change emails add their own."""
    written = None if detail is None else orjson.dumps(detail).decode()
    parameters = {"actor": actor, "action": action, "reason": reason, "email_id": email_id, "detail": written}
    await fetch(session, "audit", parameters)


async def list_held(
    session: AsyncSession, selection: Selection, *, after: UUID | None = None, limit: int = 50
) -> tuple[list[HeldEmail], int]:
    """A page of held emails, oldest first, and the number of emails on this page and all later pages.

    Args:
        after: Only emails with a higher id than this; None for the first page.
    """
    parameters = {**selection.parameters, "after": after, "limit": limit}
    rows = await fetch(session, "list_held", parameters)
    return from_rows(HeldEmail, [row[:-1] for row in rows]), rows[0][-1] if rows else 0


async def list_held_page(
    session: AsyncSession, selection: Selection, *, after: UUID | None = None, limit: int = 50
) -> list[HeldEvidence]:
    """A page of held emails with their evidence, oldest first. Fast, however many emails are held.

    Args:
        after: Only emails with a higher id than this; None for the first page.
    """
    parameters = {**selection.parameters, "after": after, "limit": limit}
    return await fetch(session, "list_held_page", parameters, into=HeldEvidence)


async def confirm_held(session: AsyncSession, email_id: UUID, *, actor: str, reason: str) -> bool:
    """Makes a held email `sent`, and adds an audit record. Returns False if the email is not held."""
    return bool(await fetch(session, "confirm_held", {"email_id": email_id, "actor": actor, "reason": reason}))


async def release_held(session: AsyncSession, email_id: UUID, *, actor: str, reason: str) -> bool:
    """Makes a held email `pending` and due, and adds an audit record.

    Returns False if the email is not held, has no content, or has expired.
    """
    return bool(await fetch(session, "release_held", {"email_id": email_id, "actor": actor, "reason": reason}))


async def find_status(session: AsyncSession, email_id: UUID) -> tuple[Status, bool] | None:
    """The email's status, and whether the email has expired; None if there is no such email."""
    rows = await fetch(session, "find_status", {"email_id": email_id})
    return (Status(rows[0][0]), rows[0][1]) if rows else None


async def find_dead_letter_emails(session: AsyncSession, email_ids: Collection[UUID]) -> dict[UUID, DeadLetterEmail]:
    """The emails that dead letters are about, by id. Does not contain ids that have no email."""
    if not email_ids:
        return {}
    rows = await fetch(session, "find_dead_letter_emails", ids_within(set(email_ids)))
    return {row[0]: DeadLetterEmail(row[1], Status(row[2]), *row[3:]) for row in rows}


async def discard_dead(session: AsyncSession, email_ids: Collection[UUID], *, actor: str, reason: str) -> set[UUID]:
    """Marks the emails' dead letters as discarded, and adds audit records.

    Returns the ids of the emails that this call marked.
    """
    if not email_ids:
        return set()
    parameters = {**ids_within(set(email_ids)), "actor": actor, "reason": reason}
    return {row[0] for row in await fetch(session, "discard_dead", parameters)}


async def find_dead_lettered(session: AsyncSession) -> dict[UUID, int]:
    """The emails whose dead letter must be on the DLQ, because the relay has published it and no operator discarded it.

    Returns the number of attempts of each email, by id.
    """
    return dict(await fetch(session, "find_dead_lettered"))


async def republish_dead_letters(session: AsyncSession, attempts: Mapping[UUID, int]) -> set[UUID]:
    """Makes dead letters due again, so that the relay publishes them again.

    Args:
        attempts: The number of attempts that the caller has read for each email. If an email now has a different
            number, the email is left out, because it has changed.

    Returns:
        The ids of the emails whose dead letter became due.
    """
    if not attempts:
        return set()
    return {row[0] for row in await fetch(session, "republish_dead_letters", ids_with("attempt_counts", attempts))}


async def audit_orphans(session: AsyncSession, counts: Mapping[UUID, int], *, actor: str, reason: str) -> None:
    """Adds audit records: an operator discarded dead letters whose emails no longer exist.

    Args:
        counts: The number of discarded dead letters, by email id.
    """
    parameters = {"email_ids": list(counts), "counts": list(counts.values()), "actor": actor, "reason": reason}
    await fetch(session, "audit_orphans", parameters)
