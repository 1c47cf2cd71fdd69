"""List what providers reported about emails after they accepted them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, Final, Self
from uuid import UUID

from dispatcher.actions.action import Paged, Reach, field
from dispatcher.domain.event import Bounce, EventKind, ReportedEvent
from dispatcher.domain.kinds import FILTER_TEXT, SINCE, TENANT, one_of

EXAMINED_EVENTS: Final = 20_000
"""The most events that one page reads. This takes some tens of milliseconds."""
EXAMINED_TENANT_EVENTS: Final = 2_000
"""As `EXAMINED_EVENTS`, for one tenant. The limit is lower because each event's email is read, too."""


class _Octets(bytes):
    """Octets in a cursor, where they are hexadecimal text."""

    def __new__(cls, text: str) -> Self:
        return super().__new__(cls, bytes.fromhex(text))


class ListReportedEvents(Paged[ReportedEvent], name="events list", query="list_recent_events", reach=Reach.ANY_TENANT):
    """List what providers reported, newest first."""

    provider: str | None = field(FILTER_TEXT, "Only events of this provider.", default=None)
    kind: EventKind | None = field(one_of(EventKind), "Only events of this kind.", default=None)
    bounce: Bounce | None = field(one_of(Bounce), "Only bounces of this kind.", default=None)
    tenant_id: str | None = field(TENANT, "Only events of this tenant's emails.", default=None)
    since: datetime | None = field(SINCE, "Only since this time: such as 24h, or 2026-11-21T10:00Z.", default=None)

    key: ClassVar = {"received_at": datetime, "email_id": UUID, "event_key": _Octets}
    stops = "provider"
    nothing = "No event matches."
    examples = ("events list",)

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        """How many events to read."""
        del source, settings
        return {"examined": EXAMINED_EVENTS if self.tenant_id is None else EXAMINED_TENANT_EVENTS}


ACTIONS = (ListReportedEvents,)
