"""What all sources of events have in common: parsed events, skipped events, and the reasons for refusing a request.

A source is a way in which a provider's events arrive, such as SendGrid's webhook or an SQS queue. A source first
verifies a request, then parses it, then stores the events. The source acknowledges the request to the provider only
after the events are committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, Protocol

from dispatcher.domain.event import ProviderEvent
from dispatcher.domain.values import dataclass, field
from dispatcher.errors import ServerUnavailable

BOUNCE_PROVIDER: Final = "smtp"
"""The provider of the events in the bounce mailbox."""


class Refusal(StrEnum):
    """Why a request with events is refused as possibly forged. Each value is a problem code of the HTTP API."""

    SIGNATURE = "signature-invalid"
    """The signature is missing or wrong, or its certificate does not come from AWS."""
    STALE = "signature-stale"
    """The signature is too old, or its time is too far in the future."""
    TOPIC = "topic-forbidden"
    """The SNS topic is not on the list of allowed topics."""


class EventsRefused(Exception):
    """A request with events is refused unread, because it may be forged. `detail` has no value from the request."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal
        self.detail = detail


class EventsUnreadable(Exception):
    """A request or message cannot be read, for example because it is not JSON. A retry would fail, too."""


class SourceUnavailable(ServerUnavailable):
    """A server of the provider is unreachable or refuses a call, so events cannot be verified or received now."""

    public = "A server of the provider is not available. The log has details."


class Skipped(StrEnum):
    """Why an event of a genuine request is not stored. Each value is also the value of a metric's label."""

    FOREIGN = "foreign"
    """The event does not name an email of ours. Another program may send through the same account."""
    UNKNOWN_KIND = "unknown_kind"
    """The provider has a kind of event that this release does not support."""
    IGNORED = "ignored"
    """The event says nothing about an email, or nothing that we use, such as a subscription to a mailing list."""
    MALFORMED = "malformed"
    """A required field is missing, or has the wrong type or an impossible value."""


@dataclass(frozen=True, slots=True)
class ParsedEvents:
    """The events of one request or message, and how many were left out."""

    events: list[ProviderEvent] = field(default_factory=list)
    skipped: Counter[Skipped] = field(default_factory=Counter)

    @classmethod
    def of(cls, found: Iterable[Sequence[ProviderEvent] | Skipped]) -> ParsedEvents:
        parsed = cls()
        for each in found:
            if isinstance(each, Skipped):
                parsed.skipped[each] += 1
            else:
                parsed.events.extend(each)
        return parsed


class EventSink(Protocol):
    """An object that stores events, such as `events.intake.EventIntake`."""

    async def store(self, events: Sequence[ProviderEvent], /) -> object:
        """Stores events. Returns after they are committed. Idempotent. If it raises StoreUnavailable, it is unknown
        which events were stored: repeat the call, or let the provider repeat the events."""
        ...
