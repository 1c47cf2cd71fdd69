"""The facts about a finished attempt, from which `spans` creates a span."""

from __future__ import annotations

from uuid import UUID

from dispatcher.domain.values import dataclass


@dataclass(frozen=True, slots=True)
class FinishedAttempt:
    """What the span of a finished attempt contains.

    Attributes:
        traceparent: W3C trace context of the enqueue; None starts a new trace.
        started_at: The start in Unix seconds.
        finished_at: The end in Unix seconds.
        error_type: A value of `domain.outcome.Reason`; None if the provider accepted the email.
    """

    traceparent: str | None
    started_at: float
    finished_at: float
    email_id: UUID
    attempt_number: int
    provider: str
    outcome: str
    error_type: str | None
