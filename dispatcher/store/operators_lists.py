"""Lists for operators, newest first, in pages. Each page reads a bounded number of rows, whatever the filter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

from dispatcher.domain.provider_event import EventKind
from dispatcher.store.statement import statement
from dispatcher.store.statements import Row, Source, fetch, from_rows

T = TypeVar("T")

EXAMINED_ROWS: Final = 20_000
"""The most rows that one page reads. This takes some tens of milliseconds."""
EXAMINED_TENANT_EVENTS: Final = 2_000
"""As `EXAMINED_ROWS`, for the events of one tenant. The limit is lower because each event's email is read, too."""
_LARGEST_ID: Final = 2**63 - 1
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_FAR: Final = 10**18
"""Microseconds that no datetime can represent."""
_CURSOR: Final = re.compile(r"(-?\d{1,18})_([0-9a-f.-]{1,128})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The row after which a page starts.

    Attributes:
        tie: The row's place among the rows with the same instant: an id, or an email's id and an event's key.
    """

    at: datetime
    tie: str

    def text(self) -> str:
        """The cursor as text for a URL; `parse` reads this text."""
        since = self.at - _EPOCH
        return f"{(since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds}_{self.tie}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The cursor with this text.

        Raises:
            ValueError: The text is not a cursor. The error's text begins with "must be".
        """
        found = _CURSOR.fullmatch(text)
        try:
            seconds, micros = divmod(int(found[1]) if found else _FAR, 1_000_000)
            at = datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)
        except (ValueError, OverflowError, OSError):
            raise ValueError("must be the cursor of an earlier page") from None
        return cls(at, found[2] if found else "")


@dataclass(frozen=True, slots=True)
class ListPage(Generic[T]):
    """A page of a list.

    Attributes:
        next: Where the next page starts; None after the last page.
    """

    rows: list[T]
    next: Cursor | None


@dataclass(frozen=True, slots=True)
class RecentEvent:
    """What a provider reported about an email, without the recipient.

    Attributes:
        happened_at: When the event happened, by the provider's clock.
        doubt: What the event does not prove (docs/events.md); None if it proves what it says.
    """

    received_at: datetime
    email_id: UUID
    event_key: bytes
    happened_at: datetime
    provider: str
    kind: str
    bounce: str | None
    code: str | None
    detail: str | None
    doubt: str | None
    tenant_id: str
    message_key: str


@dataclass(frozen=True, slots=True)
class EventCount:
    """The number of recent events that have the same provider, kind and bounce class (see `count_recent_events`)."""

    provider: str
    kind: str
    bounce: str | None
    events: int
    since: datetime


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events to list; a field that is None does not filter."""

    tenant_id: str | None = None
    provider: str | None = None
    kind: EventKind | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which operators' actions to list; a field that is None does not filter."""

    actor: str | None = None
    action: str | None = None
    email_id: UUID | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What an operator did, when and why. Contains no address."""

    audit_id: int
    acted_at: datetime
    actor: str
    action: str
    reason: str | None
    email_id: UUID | None
    replay_id: int | None
    detail: dict[str, Any] | None


async def list_events(
    source: Source, wanted: EventFilter, *, before: Cursor | None, limit: int
) -> ListPage[RecentEvent]:
    """A page of what providers reported, newest arrival first. An empty page is the last page only if `next` is None.

    Raises:
        ValueError: The cursor belongs to another list. The error's text begins with "must be".
    """
    at, (email_id, event_key) = _below(before, _event_tie, (UUID(int=2**128 - 1), b"\xff" * 64))
    examined = EXAMINED_ROWS if wanted.tenant_id is None else EXAMINED_TENANT_EVENTS
    parameters = {
        "at": at,
        "email_id": email_id,
        "event_key": event_key,
        "since": wanted.since or _EPOCH,
        "provider": wanted.provider,
        "kind": wanted.kind,
        "tenant_id": wanted.tenant_id,
        "limit": limit,
        "examined": examined,
    }
    rows = await fetch(source, "list_recent_events", parameters)
    return _page(RecentEvent, rows, 3, limit, lambda row: f"{row[1]}.{bytes(row[2]).hex()}")


@statement
async def count_recent_events(source: Source, *, examined: int = EXAMINED_ROWS) -> list[EventCount]: ...


async def list_audit(source: Source, wanted: AuditFilter, *, before: Cursor | None, limit: int) -> ListPage[AuditEntry]:
    """A page of what operators did, newest first. An empty page is the last page only if `next` is None.

    Raises:
        ValueError: The cursor belongs to another list. The error's text begins with "must be".
    """
    at, audit_id = _below(before, _number, _LARGEST_ID)
    parameters = {
        "at": at,
        "audit_id": audit_id,
        "since": wanted.since or _EPOCH,
        "actor": wanted.actor,
        "action": wanted.action,
        "limit": limit,
        "examined": EXAMINED_ROWS,
    }
    if wanted.email_id is None:
        rows = await fetch(source, "list_audit", parameters)
    else:
        rows = await fetch(source, "list_audit_of_email", {**parameters, "of_email_id": wanted.email_id})
    return _page(AuditEntry, rows, 2, limit, lambda row: str(row[0]), at=1)


def _below(before: Cursor | None, read: Callable[[str], T], highest: T) -> tuple[datetime | str, T]:
    return ("infinity", highest) if before is None else (before.at, read(before.tie))


def _number(tie: str) -> int:
    if not tie.isascii() or not tie.isdigit() or int(tie) > _LARGEST_ID:
        raise ValueError("must be the cursor of an earlier page")
    return int(tie)


def _event_tie(tie: str) -> tuple[UUID, bytes]:
    email_id, _, key = tie.partition(".")
    try:
        return UUID(email_id), bytes.fromhex(key)
    except ValueError:
        raise ValueError("must be the cursor of an earlier page") from None


def _page(
    kind: type[T], rows: Sequence[Row], bound: int, limit: int, tie: Callable[[Row], str], *, at: int = 0
) -> ListPage[T]:
    """Converts rows to a page.

    If the page is full, its last row gives the cursor of the next page. Otherwise, the last `bound` columns of each row
    give this cursor: the instant, and one or two parts of the tie (see `Cursor`). On the last page, they are null.
    """
    found = [row[:-bound] for row in rows if row[0] is not None]
    if len(found) == limit:
        return ListPage(from_rows(kind, found), Cursor(found[-1][at], tie(found[-1])))
    start = rows[0][-bound:] if rows else (None,)
    if start[0] is None:
        return ListPage(from_rows(kind, found), None)
    parts = [each.hex() if isinstance(each, bytes) else str(each) for each in start[1:]]
    return ListPage(from_rows(kind, found), Cursor(start[0], ".".join(parts)))
