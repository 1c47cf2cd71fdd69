"""The feed of events, with which applications poll what became of their emails."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal
from uuid import UUID

from dispatcher.actions.action import Page, Paged, Reach, field
from dispatcher.domain.api_key import Scope
from dispatcher.domain.event import DEFAULT_KINDS, TYPES, Bounce, OutgoingKind, kind_of
from dispatcher.domain.kinds import CURSOR_TEXT, TENANT, Kind, many, whole
from dispatcher.domain.values import dataclass

if TYPE_CHECKING:
    EventType = str
else:
    EventType = Literal[TYPES]
MAX_EVENTS: Final = 1000


@dataclass(frozen=True, slots=True)
class FeedData:
    """What an event is about."""

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    metadata: Mapping[str, str] | None
    topic: str | None
    provider: str | None
    reason: str | None
    code: str | None
    bounce: Bounce | None
    happened_at: datetime


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """An event. Its `id` is the same in each response and each webhook request; `after` takes its `cursor`."""

    id: UUID
    cursor: str
    type: EventType
    timestamp: datetime
    data: FeedData


@dataclass(frozen=True)
class FeedPage(Page[FeedEvent]):
    """A page of events. `next` is the cursor for the next request, even if there is no event.

    Attributes:
        has_more: Whether the next request may return events now.
    """

    next: str
    has_more: bool = False


def _kind(value: object) -> OutgoingKind:
    if not isinstance(value, str):
        raise TypeError
    return kind_of(value)


EVENT_TYPES: Final = many(
    Kind(f"must be one of: {', '.join(TYPES)}", {"type": "string", "enum": list(TYPES)}, _kind),
    len(TYPES),
    "types of events",
)


def _cursor(value: Any) -> str:
    from dispatcher.store.outgoing_events import Cursor

    return Cursor.parse(CURSOR_TEXT.read(value)).text()


class ListEvents(Paged[FeedEvent], name="feed", http="GET /v1/events", scope=Scope.READ, reach=Reach.ANY_TENANT):
    """Poll what became of emails. The tenant's events after a cursor, oldest first: sent, failed, held, delivered,
    bounced, complained about, suppressed, cancelled; and if `types` names them delayed, rejected, opened, clicked,
    unsubscribed. No event is skipped, however late its transaction commits. Poll again with `next`. The first request
    starts the recording of events. Events are kept for DISPATCHER_RETAIN_EVENTS_DAYS.
    """

    after: str | None = field(
        Kind("must be a cursor from an earlier response", CURSOR_TEXT.schema, _cursor, metavar="CURSOR"),
        "The `next` of an earlier response, or the `cursor` of an event. Without it, the response begins with the "
        "oldest event that is kept.",
        default=None,
    )
    limit: int = field(whole(1, MAX_EVENTS), "The most events per response.", default=100)
    types: tuple[OutgoingKind, ...] = field(
        EVENT_TYPES,
        f"The types of events: {', '.join(TYPES)}.  [default: all up to {DEFAULT_KINDS[-1].type}]",
        default=DEFAULT_KINDS,
    )
    tenant_id: str | None = field(TENANT, "The tenant; by default, the tenant of the key.", default=None)

    key: ClassVar = {"cursor": str}
    page_type: ClassVar = FeedPage
    plural = "events"

    def position(self) -> dict[str, Any]:
        """The cursor is read by `run`."""
        return {}

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Any:
        """One page. Also turns the feed on (see `read_page`)."""
        from dispatcher.store.outgoing_events import Cursor, read_page

        after = None if self.after is None else Cursor.parse(self.after)
        found = await read_page(source, after, tenant=parameters["tenant_id"], kinds=self.types, limit=self.limit)
        rows = []
        for event, cursor in found.events:
            whole = event.document()
            rows.append(FeedEvent(event.event_id, cursor, whole["type"], whole["timestamp"], FeedData(**whole["data"])))
        return FeedPage(rows, found.next, found.has_more)
