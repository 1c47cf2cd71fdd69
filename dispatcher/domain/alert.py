"""An alert: what a person has to be told about the dead letters, and when it is time to tell it again.

    nothing told ──the state begins──▶ raised ──it lasts──▶ reminded ──it lasts──▶ …
                                          └──────────── it is over ──▶ resolved, nothing told

A state that could not be looked at (the probe failed) is neither begun nor over.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

SEVERITY: Final = "CRITICAL"
MANUAL: Final = "Manual intervention is required."
MAX_CORRELATION_IDS: Final = 10
"""Enough to find the cause; an alert is no list of emails."""
MOST_DUE: Final = 10_000
"""An alert counts due emails up to this number."""


class Kind(StrEnum):
    """What is wrong."""

    DEAD_LETTERS = "dead_letters"
    """The DLQ holds messages."""
    DEAD_LETTERS_UNPUBLISHED = "dead_letters_unpublished"
    """Dead letters grow old without reaching the DLQ, so that its depth does not tell of them."""
    PROBE_FAILED = "probe_failed"
    """Nobody knows how many messages the DLQ holds."""
    UNDECIDED_EXPIRING = "undecided_expiring"
    """Failed or held emails lose their content within a week, because no operator has decided them."""
    NOTHING_SENT = "nothing_sent"
    """Emails are due, and no provider has accepted one for a while."""
    PROVIDER_UNUSABLE = "provider_unusable"
    """Workers have not been able to use a provider for a while."""
    HOST_VANISHED = "host_vanished"
    """A host has been silent for a while, and did not stop in order."""


_COMPONENTS: Final = {
    Kind.DEAD_LETTERS: "RabbitMQ",
    Kind.DEAD_LETTERS_UNPUBLISHED: "RabbitMQ",
    Kind.PROBE_FAILED: "RabbitMQ",
    Kind.UNDECIDED_EXPIRING: "PostgreSQL",
    Kind.NOTHING_SENT: "dispatcher",
    Kind.PROVIDER_UNUSABLE: "provider",
    Kind.HOST_VANISHED: "host",
}


class Phase(StrEnum):
    """Where in its life an alert stands when it is told."""

    RAISED = "raised"
    REMINDED = "reminded"
    RESOLVED = "resolved"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Alert:
    """A state that a person has to mend, as it was just looked at.

    Holds nothing of any email but correlation ids, scrubbed.

    Attributes:
        stands: Whether the state is there; else it was, or may never have been.
        queue: The DLQ.
        raised_at: Since when we know of it.
        count: Messages on the DLQ, or emails that expire or are due; None if unknown, or if the kind counts nothing.
        oldest_age_seconds: Since the oldest one failed, or at least since we know of it; None where nobody knows.
        correlation_ids: Of the oldest, at most `MAX_CORRELATION_IDS`.
        reason: Why the probe failed or nothing is sent, or the providers or hosts concerned; None for other kinds.
        host: Who looked.
        is_alone: PostgreSQL is away: each host tells for itself.
    """

    kind: Kind
    stands: bool
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
        """What the alert is about: a server, or a part of the dispatcher."""
        return _COMPONENTS[self.kind]


@dataclass(frozen=True, slots=True)
class Notice:
    """An alert on its way to a person.

    Attributes:
        notice_id: The same when it is tried again, so that a receiver can tell repetitions.
        at: When it was made.
    """

    notice_id: str
    phase: Phase
    at: datetime
    alert: Alert


def next_phase(*, stands: bool, told_age_seconds: float | None, reminder_seconds: float) -> Phase | None:
    """What to tell now; None if nothing.

    Args:
        stands: Whether the state is there.
        told_age_seconds: How long ago it was last told that it is; None if it was not, or if its end was told since.
    """
    if told_age_seconds is None:
        return Phase.RAISED if stands else None
    if not stands:
        return Phase.RESOLVED
    return Phase.REMINDED if told_age_seconds >= reminder_seconds else None
