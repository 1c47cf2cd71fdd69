"""Lists for operators, newest first, in pages. Each page reads a bounded number of rows, whatever the filter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Generic, TypeVar

from dispatcher.domain.suppression import SuppressionReason
from dispatcher.store.statement import statement
from dispatcher.store.statements import Row, Source, fetch, from_rows
from dispatcher.store.suppressions import Suppression

T = TypeVar("T")

EXAMINED_ROWS: Final = 20_000
"""The most rows that one page reads. This takes some tens of milliseconds."""
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
class EventCount:
    """The number of recent events that have the same provider, kind and bounce class (see `count_recent_events`)."""

    provider: str
    kind: str
    bounce: str | None
    events: int
    since: datetime


@statement
async def count_recent_events(source: Source, *, examined: int = EXAMINED_ROWS) -> list[EventCount]: ...


async def list_suppressions(
    source: Source,
    tenant_id: str,
    *,
    reason: SuppressionReason | None,
    since: datetime | None,
    before: Cursor | None,
    limit: int,
) -> ListPage[Suppression]:
    """A page of a tenant's suppressions, newest first, including expired ones. A filter that is None does not filter.

    Raises:
        ValueError: The cursor belongs to another list. The error's text begins with "must be".
    """
    at, suppression_id = _below(before, _number, _LARGEST_ID)
    parameters = {
        "tenant_id": tenant_id,
        "at": at,
        "suppression_id": suppression_id,
        "since": since or _EPOCH,
        "reason": reason and reason.value,
        "limit": limit,
        "examined": EXAMINED_ROWS,
    }
    rows = await fetch(source, "page_suppressions", parameters)
    return _page(Suppression, rows, 2, limit, lambda row: str(row[0]), at=7)


def _below(before: Cursor | None, read: Callable[[str], T], highest: T) -> tuple[datetime | str, T]:
    return ("infinity", highest) if before is None else (before.at, read(before.tie))


def _number(tie: str) -> int:
    if not tie.isascii() or not tie.isdigit() or int(tie) > _LARGEST_ID:
        raise ValueError("must be the cursor of an earlier page")
    return int(tie)


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
