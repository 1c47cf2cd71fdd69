"""Failed and held emails, as operators ask for them; `standings` has what the DLQ's letters ask."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import orjson

from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import ids_within, query

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


async def list_dead(
    session: AsyncSession, selection: Selection, *, before: UUID | None = None, limit: int = 50
) -> tuple[list[DeadEmail], int]:
    """A page of them, the newest first, and how many there are from its first one on."""
    rows = await _fetch(session, "list_dead", {**selection.parameters, "before": before, "limit": limit})
    return [_dead_email(row) for row in rows], rows[0][-1] if rows else 0


async def count_dead(session: AsyncSession, selection: Selection, by: str) -> list[Group]:
    """How many there are by one of `GROUPS`, the most frequent first."""
    return [Group(*row) for row in await _fetch(session, "count_dead", {**selection.parameters, "by": by})]


async def preview_dead(
    session: AsyncSession, selection: Selection, *, include_held: bool, sample: int
) -> dict[str, tuple[int, list[UUID]]]:
    """What a replay would do: how many by outcome, and the first ids of each."""
    parameters = {**selection.parameters, "include_held": include_held, "sample": sample}
    return {outcome: (count, ids) for outcome, count, ids in await _fetch(session, "preview_dead", parameters)}


async def find_dead_ids(session: AsyncSession, selection: Selection) -> list[UUID]:
    """All of them, the oldest first."""
    return [row[0] for row in await _fetch(session, "find_dead_ids", selection.parameters)]


async def find_known_ids(session: AsyncSession, email_ids: Collection[UUID]) -> set[UUID]:
    """Which of these are emails."""
    if not email_ids:
        return set()
    return {row[0] for row in await _fetch(session, "find_known_ids", ids_within(set(email_ids)))}


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
    with translated():
        await session.execute(query("audit"), parameters)


def _dead_email(row: tuple[Any, ...]) -> DeadEmail:
    values = list(row[:-1])
    values[4] = Status(values[4])
    return DeadEmail(*values)


async def _fetch(session: AsyncSession, name: str, parameters: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
    with translated():
        cursor = await session.execute(query(name), parameters)
        return await cursor.fetchall()
