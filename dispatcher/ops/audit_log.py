"""What operators did, when and why: the audit log, for everybody who may see all tenants."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from dispatcher.store import operators_lists as store
from dispatcher.store.connections import AsyncSession
from dispatcher.store.operators_lists import AuditEntry, Cursor, ListPage


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which acts to list; a field that is None does not filter."""

    actor: str | None = None
    action: str | None = None
    email_id: UUID | None = None
    since: datetime | None = None


async def list_acts(
    session: AsyncSession, wanted: AuditFilter, *, before: Cursor | None = None, limit: int
) -> ListPage[AuditEntry]:
    """A page of acts, newest first. A page may be empty although `next` continues: each page reads a bounded part.

    Raises:
        ValueError: `before` is the cursor of another list. The message is a predicate.
    """
    return await store.list_audit(
        session,
        actor=wanted.actor,
        action=wanted.action,
        email_id=wanted.email_id,
        since=wanted.since,
        before=before,
        limit=limit,
    )
