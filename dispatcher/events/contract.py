"""What every source of events has in common: the events that it parsed, what it left out, and why it refuses a request.

A source verifies first, parses second, and stores third. It acknowledges a delivery to the provider only after the
events are committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from dispatcher.domain.provider_event import ProviderEvent
from dispatcher.errors import ServerUnavailable


class Refusal(StrEnum):
    """Why a request is not genuine. Each value is a problem code of the HTTP API."""

    SIGNATURE = "signature-invalid"
    """The signature is missing or wrong, or its certificate does not come from AWS."""
    STALE = "signature-stale"
    """The signature is too old, or its time is in the future."""
    TOPIC = "topic-forbidden"
    """The SNS topic is not on the list of allowed topics."""


class EventsRefused(Exception):
    """A request with events is not genuine. Its events were neither parsed nor stored.

    Attributes:
        detail: Why, without a value from the request.
    """

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal
        self.detail = detail


class EventsUnreadable(Exception):
    """A request or message is not JSON. It will not become JSON, so a retry is useless."""


class SourceUnavailable(ServerUnavailable):
    """A server of the provider is unreachable, so nothing can be verified, confirmed or received now."""

    public = "A server of the provider is not available. The log has details."


class Skipped(StrEnum):
    """Why an event of a genuine request is not stored. The value of a metric's label."""

    FOREIGN = "foreign"
    """The event does not name an email of ours: another program sends through the same account."""
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

    def add(self, found: Sequence[ProviderEvent] | Skipped) -> None:
        """Adds the events of one notice, or counts the notice as skipped."""
        if isinstance(found, Skipped):
            self.skipped[found] += 1
        else:
            self.events.extend(found)


class EventSink(Protocol):
    """Stores events; `events.intake.EventIntake` does."""

    async def store(self, events: Sequence[ProviderEvent], /) -> object:
        """Returns after the events are committed. Idempotent.

        Raises:
            StoreUnavailable: Some events may not be stored. Repeat the call, or let the provider repeat the events.
        """
        ...
