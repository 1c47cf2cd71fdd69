"""The facts about a finished attempt, from which `spans` creates a span."""

from __future__ import annotations

from uuid import UUID

from dispatcher.domain.values import dataclass


@dataclass(frozen=True, slots=True)
class FinishedAttempt:
    """What the span of a finished attempt contains; times in Unix seconds. Without `traceparent`, it starts a new
    trace."""

    traceparent: str | None
    started_at: float
    finished_at: float
    email_id: UUID
    attempt_number: int
    provider: str
    outcome: str
    error_type: str | None
