"""Alerts: the conditions that an operator must act on, and when to send the next notice.

    no notice ──condition begins──▶ raised ──it persists──▶ reminded ──it persists──▶ …
                                      └──────────── condition ends ──▶ resolved, no notice

If a condition cannot be checked, for example because RabbitMQ is unreachable, the condition neither begins nor ends.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final, Protocol

from dispatcher.domain.values import dataclass

SEVERITY: Final = "CRITICAL"
MANUAL: Final = "Manual intervention is required."
MAX_CORRELATION_IDS: Final = 10
"""The most correlation ids in an alert. Ten are enough to find the cause."""
MAX_DUE_COUNT: Final = 10_000
"""The count of due emails in an alert stops at this number."""


class Kind(StrEnum):
    """The condition that an alert reports."""

    DEAD_LETTERS = "dead_letters"
    """The DLQ contains messages."""
    DEAD_LETTERS_UNPUBLISHED = "dead_letters_unpublished"
    """The relay does not publish dead letters: the oldest has been due for too long. The DLQ's depth does not show
    this."""
    PROBE_FAILED = "probe_failed"
    """The monitor could not read the depth of the DLQ."""
    UNDECIDED_EXPIRING = "undecided_expiring"
    """Failed or held emails lose their content within a week, because no operator has resolved them."""
    NOTHING_SENT = "nothing_sent"
    """Emails are due, and no provider has accepted an email for a while."""
    PROVIDER_UNUSABLE = "provider_unusable"
    """Workers have not been able to use a provider for a while."""
    HOST_VANISHED = "host_vanished"
    """A host has not reported for a while, and was not shut down cleanly."""
    WEBHOOK_DISABLED = "webhook_disabled"
    """The monitor has disabled a webhook: its receiver accepted nothing for about 27 hours, or answered 410 (Gone)."""
    IMPOSSIBLE_EVENTS = "impossible_events"
    """Within the last day, a provider reported events about emails that no worker can have sent through it."""
    PAUSED = "paused"
    """A pause without an end time has lasted for a long time. The operator may have forgotten it."""


_COMPONENTS: Final = {
    Kind.DEAD_LETTERS: "RabbitMQ",
    Kind.DEAD_LETTERS_UNPUBLISHED: "RabbitMQ",
    Kind.PROBE_FAILED: "RabbitMQ",
    Kind.UNDECIDED_EXPIRING: "PostgreSQL",
    Kind.NOTHING_SENT: "dispatcher",
    Kind.PROVIDER_UNUSABLE: "provider",
    Kind.HOST_VANISHED: "host",
    Kind.WEBHOOK_DISABLED: "webhook",
    Kind.IMPOSSIBLE_EVENTS: "provider",
    Kind.PAUSED: "dispatcher",
}


class Phase(StrEnum):
    """What a notice reports: the condition began, persists or has ended; or an operator tests the alerts."""

    RAISED = "raised"
    REMINDED = "reminded"
    RESOLVED = "resolved"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Alert:
    """The result of the last check of a condition that needs an operator. Of the emails' data, it contains only
    correlation ids, from which addresses are removed.

    `count` and `reason` depend on the kind, and are None if unknown. `oldest_age_seconds` may be a lower bound. While
    PostgreSQL is unavailable, `is_alone`: the hosts cannot agree which of them sends notices, so each sends its own.
    """

    kind: Kind
    is_firing: bool
    queue: str
    raised_at: datetime
    host: str
    count: int | None = None
    oldest_age_seconds: float | None = None
    correlation_ids: tuple[str, ...] = ()
    reason: str | None = None
    is_alone: bool = False

    @property
    def component(self) -> str:
        """The affected component: a server, or a part of the dispatcher."""
        return _COMPONENTS[self.kind]


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to an operator about an alert. If it is sent again after an error, it has the same id, so that a
    receiver can ignore the repetition; a reminder is a new notice."""

    notice_id: str
    phase: Phase
    at: datetime
    alert: Alert


class NotDelivered(Exception):
    """A channel did not deliver a notice, or does not know whether it did. A second try may succeed. `reason` contains
    no addresses and no secrets."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Channel(Protocol):
    """A way to notify operators."""

    @property
    def name(self) -> str:
        """The channel's name in the log, in the database and in settings."""
        ...

    async def send(self, notice: Notice) -> str:
        """Sends a notice, or fails within seconds. Returns the result, such as `the receiver answered 204`. Raises
        NotDelivered if the notice was not accepted, or the result is unknown."""
        ...


def next_phase(*, is_firing: bool, notice_age_seconds: float | None, reminder_seconds: float) -> Phase | None:
    """The phase that the next notice reports; None if no notice is due. `notice_age_seconds` is None before the first
    notice."""
    if notice_age_seconds is None:
        return Phase.RAISED if is_firing else None
    if not is_firing:
        return Phase.RESOLVED
    return Phase.REMINDED if notice_age_seconds >= reminder_seconds else None
