"""The facts about an attempt from which `spans` makes a span."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class FinishedAttempt:
    """A finished attempt.

    Attributes:
        traceparent: W3C trace context of the enqueue; None starts a new trace.
        started_at: Unix seconds, as is `finished_at`.
        error_type: A value of `domain.outcome.Reason`; None if the provider accepted.
    """

    traceparent: str | None
    started_at: float
    finished_at: float
    email_id: UUID
    attempt_number: int
    provider: str
    outcome: str
    error_type: str | None
