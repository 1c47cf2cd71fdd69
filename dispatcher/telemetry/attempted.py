"""What a span says of an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Attempted:
    """One attempt that ended.

    Attributes:
        traceparent: W3C trace context of whoever enqueued the email; None makes the span the first of its trace.
        started_at: Unix seconds.
        error_type: A word of `domain.outcome.Reason`; None where the provider accepted.
    """

    traceparent: str | None
    started_at: float
    finished_at: float
    email_id: UUID
    attempt_number: int
    provider: str
    outcome: str
    error_type: str | None
