"""Alerts: the conditions that an operator must act on, and when to send the next notice.

    no notice ──condition begins──▶ raised ──it persists──▶ reminded ──it persists──▶ …
                                      └──────────── condition ends ──▶ resolved, no notice

If a check cannot run (the probe failed), the condition neither begins nor ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

SEVERITY: Final = "CRITICAL"
MANUAL: Final = "Manual intervention is required."
MAX_CORRELATION_IDS: Final = 10
"""Enough to find the cause. An alert is not a list of emails."""
MAX_DUE_COUNT: Final = 10_000
"""An alert counts due emails up to this number."""


class Kind(StrEnum):
    """The condition that an alert reports."""

    DEAD_LETTERS = "dead_letters"
    """The DLQ contains messages."""
    DEAD_LETTERS_UNPUBLISHED = "dead_letters_unpublished"
    """Dead letters do not reach the DLQ: the oldest has been due for too long. The DLQ's depth does not show this."""
    PROBE_FAILED = "probe_failed"
    """The depth of the DLQ could not be read."""
    UNDECIDED_EXPIRING = "undecided_expiring"
    """Failed or held emails lose their content within a week, because no operator has resolved them."""
    NOTHING_SENT = "nothing_sent"
    """Emails are due, and no provider has accepted an email for a while."""
    PROVIDER_UNUSABLE = "provider_unusable"
    """Workers have not been able to use a provider for a while."""
    HOST_VANISHED = "host_vanished"
    """A host has not reported for a while, and was not shut down cleanly."""
    WEBHOOK_DISABLED = "webhook_disabled"
    """A webhook gets no events, because its receiver accepted nothing for a day, or is gone."""
    PAUSED = "paused"
    """An operator's pause without an end has been in force for a long time, and may have been forgotten."""


_COMPONENTS: Final = {
    Kind.DEAD_LETTERS: "RabbitMQ",
    Kind.DEAD_LETTERS_UNPUBLISHED: "RabbitMQ",
    Kind.PROBE_FAILED: "RabbitMQ",
    Kind.UNDECIDED_EXPIRING: "PostgreSQL",
    Kind.NOTHING_SENT: "dispatcher",
    Kind.PROVIDER_UNUSABLE: "provider",
    Kind.HOST_VANISHED: "host",
    Kind.WEBHOOK_DISABLED: "webhook",
    Kind.PAUSED: "dispatcher",
}


class Phase(StrEnum):
    """The phase of an alert that a notice reports."""

    RAISED = "raised"
    REMINDED = "reminded"
    RESOLVED = "resolved"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that needs an operator, as the last check found it.

    Contains nothing from any email except correlation ids, scrubbed.

    Attributes:
        is_firing: Whether the condition is true now. If not, it has ended, or never began.
        queue: The DLQ.
        raised_at: When the condition was first seen.
        count: Messages on the DLQ, or emails that expire or are due; None if unknown, or if the kind has no count.
        oldest_age_seconds: Time since the oldest email failed, or a lower bound; None if unknown.
        correlation_ids: The correlation ids of the oldest emails, at most `MAX_CORRELATION_IDS`.
        reason: Why the probe failed or nothing is sent, or the affected providers, hosts, webhooks or pauses; None
            for other kinds.
        host: The host that ran the check.
        is_alone: Whether PostgreSQL is unavailable. If so, each host sends notices by itself.
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
    """A message to an operator about an alert.

    Attributes:
        notice_id: The same when the notice is sent again. A receiver can use it to drop repetitions.
        at: When the notice was created.
    """

    notice_id: str
    phase: Phase
    at: datetime
    alert: Alert


def next_phase(*, is_firing: bool, notice_age_seconds: float | None, reminder_seconds: float) -> Phase | None:
    """The phase that the next notice tells; None if no notice is due.

    Args:
        is_firing: Whether the condition is true now.
        notice_age_seconds: Seconds since the last notice about the condition; None if no notice was sent yet.
    """
    if notice_age_seconds is None:
        return Phase.RAISED if is_firing else None
    if not is_firing:
        return Phase.RESOLVED
    return Phase.REMINDED if notice_age_seconds >= reminder_seconds else None
