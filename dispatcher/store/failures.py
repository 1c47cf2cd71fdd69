"""Failed and held emails: what operators ask for and decide, and which of them need a letter on the DLQ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import orjson

from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession
from dispatcher.store.queries import ids_with, ids_within
from dispatcher.store.statements import fetch, made

GROUPS: Final = ("error_type", "provider", "tenant", "status", "error")
"""What `count_dead` counts by."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which failed and held emails; what is None does not filter.

    Attributes:
        status: `failed` or `held`.
        text: Part of the error's words, in any case.
        older_than_seconds: Enqueued longer ago.
        newer_than_seconds: Enqueued since.
        email_ids: Only these.
        discarded: Those whose dead letter a person took away; False, as usual, for those that still have one.
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

    @property
    def filters(self) -> dict[str, Any]:
        """What filters, by name; ids left out."""
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
    """An email that failed or is held; nothing private.

    Attributes:
        is_letter_due: Its dead letter is still to be published.
        discarded_at: When a person took its dead letter away.
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
    """How many failed and held emails have something in common, and when the first and last of them were enqueued."""

    value: str
    emails: int
    oldest_at: datetime
    newest_at: datetime


@dataclass(frozen=True, slots=True)
class HeldEmail:
    """An email whose outcome is unknown; nothing private."""

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    provider: str | None
    attempt_count: int
    last_error: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class LetterEmail:
    """What the row of a dead letter's email says now.

    Attributes:
        attempt_count: Together with the id it names one failure: every later one has more attempts.
        is_discarded: An operator took its letter away for good.
    """

    message_key: str
    status: Status
    attempt_count: int
    is_discarded: bool


async def list_dead(
    session: AsyncSession, selection: Selection, *, before: UUID | None = None, limit: int = 50
) -> tuple[list[DeadEmail], int]:
    """A page of them, the newest first, and how many there are from its first one on."""
    rows = await fetch(session, "list_dead", {**selection.parameters, "before": before, "limit": limit})
    return made(DeadEmail, [row[:-1] for row in rows]), rows[0][-1] if rows else 0


async def count_dead(session: AsyncSession, selection: Selection, by: str) -> list[Group]:
    """How many there are by one of `GROUPS`, the most frequent first."""
    return await fetch(session, "count_dead", {**selection.parameters, "by": by}, into=Group)


async def preview_dead(
    session: AsyncSession, selection: Selection, *, include_held: bool, sample: int
) -> dict[str, tuple[int, list[UUID]]]:
    """What a replay would do: how many by outcome, and the first ids of each."""
    parameters = {**selection.parameters, "include_held": include_held, "sample": sample}
    return {outcome: (count, ids) for outcome, count, ids in await fetch(session, "preview_dead", parameters)}


async def find_dead_ids(session: AsyncSession, selection: Selection) -> list[UUID]:
    """All of them, the oldest first."""
    return [row[0] for row in await fetch(session, "find_dead_ids", selection.parameters)]


async def find_known_ids(session: AsyncSession, email_ids: Collection[UUID]) -> set[UUID]:
    """Which of these are emails."""
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
    """Puts an act on record that changed no row."""
    written = None if detail is None else orjson.dumps(detail).decode()
    parameters = {"actor": actor, "action": action, "reason": reason, "email_id": email_id, "detail": written}
    await fetch(session, "audit", parameters)


async def list_held(
    session: AsyncSession, selection: Selection, *, after: UUID | None = None, limit: int = 50
) -> tuple[list[HeldEmail], int]:
    """A page of held emails, oldest first, and how many there are from its first one on."""
    parameters = {**selection.parameters, "after": after, "limit": limit}
    rows = await fetch(session, "list_held", parameters)
    return made(HeldEmail, [row[:-1] for row in rows]), rows[0][-1] if rows else 0


async def confirm_held(session: AsyncSession, email_id: UUID, *, actor: str, reason: str) -> bool:
    """Makes a held email `sent`, in one audited commit; False if it is not held."""
    return bool(await fetch(session, "confirm_held", {"email_id": email_id, "actor": actor, "reason": reason}))


async def release_held(session: AsyncSession, email_id: UUID, *, actor: str, reason: str) -> bool:
    """Makes a held email `pending` and due, in one audited commit; False if it is not held or has no content."""
    return bool(await fetch(session, "release_held", {"email_id": email_id, "actor": actor, "reason": reason}))


async def find_status(session: AsyncSession, email_id: UUID) -> Status | None:
    """The email's status; None if there is no such email."""
    rows = await fetch(session, "find_status", {"email_id": email_id})
    return Status(rows[0][0]) if rows else None


async def find_failures(session: AsyncSession, email_ids: Collection[UUID]) -> dict[UUID, LetterEmail]:
    """The emails of dead letters, by id; an id without a row is left out."""
    if not email_ids:
        return {}
    rows = await fetch(session, "find_failures", ids_within(set(email_ids)))
    return {row[0]: LetterEmail(row[1], Status(row[2]), *row[3:]) for row in rows}


async def discard_dead(session: AsyncSession, email_ids: Collection[UUID], *, actor: str, reason: str) -> set[UUID]:
    """Notes that their dead letters are taken away for good, on record; returns those for which that is news."""
    if not email_ids:
        return set()
    parameters = {**ids_within(set(email_ids)), "actor": actor, "reason": reason}
    return {row[0] for row in await fetch(session, "discard_dead", parameters)}


async def find_announced(session: AsyncSession) -> dict[UUID, int]:
    """The emails whose dead letter must be on the DLQ, with how many attempts it counts."""
    return dict(await fetch(session, "find_announced"))


async def announce_again(session: AsyncSession, attempts: Mapping[UUID, int]) -> set[UUID]:
    """Has dead letters published again, attempts by id; returns for which emails."""
    if not attempts:
        return set()
    return {row[0] for row in await fetch(session, "announce_again", ids_with("attempt_counts", attempts))}


async def audit_orphans(session: AsyncSession, letters: Mapping[UUID, int], *, actor: str, reason: str) -> None:
    """Puts on record that the dead letters of emails that are gone are taken away for good, how many by id."""
    parameters = {"email_ids": list(letters), "letters": list(letters.values()), "actor": actor, "reason": reason}
    await fetch(session, "audit_orphans", parameters)
