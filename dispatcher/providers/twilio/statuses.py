"""What Twilio's statuses of a message mean: https://www.twilio.com/docs/messaging/api/message-resource#message-status-values

A status becomes the same event, whether Twilio reports it in a status callback or in the list of messages.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.providers.twilio.responses import NAME
from dispatcher.providers.twilio.responses import OPTED_OUT as _OPTED_OUT

NUMBER: Final = re.compile(r"\+[0-9]{3,15}", re.ASCII)
SID: Final = re.compile(r"[A-Z]{2}[0-9a-f]{32}", re.ASCII)
OPTED_OUT: Final = str(_OPTED_OUT)
KINDS: Final = {
    "accepted": EventKind.ACCEPTED,
    "queued": EventKind.ACCEPTED,
    "sending": EventKind.ACCEPTED,
    "sent": EventKind.ACCEPTED,
    "delivered": EventKind.DELIVERED,
    "read": EventKind.OPENED,
    "undelivered": EventKind.BOUNCED,
    "failed": EventKind.REJECTED,
    "canceled": EventKind.REJECTED,
}
_HARD: Final = frozenset({"21211", "21614", "30005", "30006"})
"""Twilio's error codes if the number does not exist, or cannot get SMS."""
_BLOCKED: Final = frozenset({"30004", "30007", "30034"})
"""Twilio's error codes if the recipient or a network blocks the sender."""


def event_of(
    email_id: UUID,
    status: str,
    now: datetime,
    *,
    sid: str,
    recipient: str,
    code: str | None = None,
    detail: str | None = None,
) -> ProviderEvent | None:
    """The event for a status, if one corresponds to it. Twilio does not report when the status changed: `now`
    counts."""
    kind = EventKind.UNSUBSCRIBED if code == OPTED_OUT else KINDS.get(status)
    if kind is None:
        return None
    bounce = Bounce.HARD if code in _HARD else Bounce.BLOCKED if code in _BLOCKED else Bounce.SOFT
    return ProviderEvent(
        email_id=email_id,
        provider=NAME,
        kind=kind,
        happened_at=now,
        is_dated=False,
        recipient=recipient if NUMBER.fullmatch(recipient) else None,
        bounce=bounce if kind is EventKind.BOUNCED else None,
        code=code[:20] if code else None,
        detail=detail,
        # A replayed SMS has a new SID. The SID is part of the event's key, so that the events of the replayed SMS do
        # not count as repetitions of the events of the first SMS.
        distinction=sid,
    )
