"""Reads the feed of events for applications (`outgoing_event`). The statements that change emails write the feed."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Self

from dispatcher.domain.event import OutgoingEvent, OutgoingKind
from dispatcher.domain.values import dataclass
from dispatcher.store.statements import Row, Source, fetch

ALL_KINDS: Final = frozenset(OutgoingKind)
MAX_SLICE_EVENTS: Final = 1000
"""The most events that one statement reads."""
MAX_SLICES: Final = 20
"""The most statements for one page. If nearly all events of the feed belong to other tenants, one statement finds only
a part of a page."""
REWIND: Final = timedelta(hours=1)
"""After a restore or a promotion, a reader gets the events of this time before its cursor again."""
_CURSOR: Final = re.compile(rb"(\d{1,9})\.(\d{1,18})\.(\d{1,18})\.(\d{1,14})")


class Position(NamedTuple):
    """The position of an event in the feed. A reader at this position has handled this event and all earlier events."""

    made_in: int  # the id of the transaction that added the event
    number: int  # higher for later events of the same transaction


BEGINNING: Final = Position(0, 0)


class FoundEvent(NamedTuple):
    position: Position
    event: OutgoingEvent


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of the feed."""

    events: list[FoundEvent]
    end: Position  # of the last event that was read, even if `events` does not contain this event
    is_last: bool  # whether no later event can be read now


@dataclass(frozen=True, slots=True)
class Cursor:
    """A reader's position in the feed. The reader stores the cursor as an opaque text.

    The position contains a transaction id. PostgreSQL assigns the same ids again after a restore, and after a promotion
    that lost commits. So the cursor also contains PostgreSQL's timeline and a time; see `_resume`.
    """

    timeline: int  # PostgreSQL's timeline when the cursor was made
    position: Position
    at: datetime  # when the reader's last event was added to the feed; without one, when the cursor was made

    def text(self) -> str:
        parts = (self.timeline, *self.position, int(self.at.timestamp() * 1000))
        return base64.urlsafe_b64encode(".".join(map(str, parts)).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cursor with this text. Raises ValueError if the text is not a cursor; the error's text begins with "must
        be"."""
        try:
            decoded = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (ValueError, binascii.Error):
            decoded = b""
        found = _CURSOR.fullmatch(decoded)
        if found is None:
            raise ValueError("must be a cursor from an earlier response")
        timeline, made_in, number, milliseconds = map(int, found.groups())
        return cls(timeline, Position(made_in, number), datetime.fromtimestamp(milliseconds / 1000, UTC))


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of events for a reader that polls."""

    events: list[tuple[OutgoingEvent, str]]
    next: str
    has_more: bool  # whether the next page might already contain events


async def read_slice(
    source: Source, after: Position, *, tenant: str | None, kinds: Collection[OutgoingKind], limit: int
) -> Slice:
    """Reads up to `limit` events of the feed after a position. Returns those that have the wanted tenant (None: any)
    and kinds.

    Stops before the events of the oldest open transaction, so a reader misses no event of a transaction that commits
    late.
    """
    parameters = {
        "made_in": str(after.made_in),
        "position": after.number,
        "tenant_id": tenant,
        "kinds": sorted(map(str, kinds)),
        "limit": limit,
    }
    rows = await fetch(source, "read_feed", parameters)
    if not rows:
        return Slice([], after, is_last=True)
    found = [FoundEvent(Position(row[0], row[1]), event_of(row[4:])) for row in rows if row[2]]
    return Slice(found, Position(rows[-1][0], rows[-1][1]), is_last=rows[0][3] < limit)


async def read_page(
    source: Source, cursor: Cursor | None, *, tenant: str, kinds: Collection[OutgoingKind] = ALL_KINDS, limit: int
) -> EventPage:
    """Reads a page of a tenant's events of these kinds after the previous page's `next`; None for the oldest events.
    The first call also turns the feed on: from then on, statements write events."""
    await fetch(source, "want_feed")
    ((timeline, next_transaction),) = await fetch(source, "find_timeline")
    position = await _resume(source, cursor, timeline, next_transaction)
    events: list[FoundEvent] = []
    is_last = False
    for _ in range(MAX_SLICES):
        part = await read_slice(source, position, tenant=tenant, kinds=kinds, limit=MAX_SLICE_EVENTS)
        events += part.events
        position, is_last = part.end, part.is_last
        if is_last or len(events) >= limit:
            break
    if len(events) > limit:
        events, is_last = events[:limit], False
    if len(events) == limit:
        position = events[-1].position
    at = cursor.at if cursor else datetime.now(UTC)
    paired = [(found.event, Cursor(timeline, found.position, found.event.created_at).text()) for found in events]
    end = Cursor(timeline, position, events[-1].event.created_at if events else at)
    return EventPage(paired, end.text(), has_more=not is_last)


async def _resume(source: Source, cursor: Cursor | None, timeline: int, next_transaction: int) -> Position:
    """The position after which to continue: usually the cursor's position. After a restore or a promotion, an earlier
    position, so that the reader misses no event."""
    if cursor is None:
        return BEGINNING
    if cursor.timeline == timeline and cursor.position.made_in <= next_transaction:
        return cursor.position
    ((made_in,),) = await fetch(source, "find_feed_since", {"since": max(_EPOCH, cursor.at - REWIND)})
    return BEGINNING if made_in is None else Position(made_in, 0)


_EPOCH: Final = datetime.fromtimestamp(0, UTC)


def event_of(row: Sequence[object] | Row) -> OutgoingEvent:
    """Converts a row of `outgoing_event` from the column `event_id` on."""
    event_id, kind, *rest = row
    return OutgoingEvent(event_id, OutgoingKind(str(kind)), *rest)  # type: ignore[arg-type]
