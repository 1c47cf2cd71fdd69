"""What is told of an attempt that ended: a line in the log, and a span where traces are on."""

from __future__ import annotations

from dispatcher.domain.outcome import Accepted, Outcome, outcome_name
from dispatcher.domain.status import Status
from dispatcher.telemetry import quick_log
from dispatcher.telemetry.tracing import TRACER, Attempted
from dispatcher.worker.sending import Sending


def tell_attempt(sending: Sending, outcome: Outcome, status: Status, finished_at: float) -> None:
    """Tells of it once it is decided.

    Args:
        status: Where the email stands after it.
        finished_at: Unix seconds.
    """
    _log(sending, outcome, status, finished_at)
    if TRACER.is_on:
        _trace(sending, outcome, finished_at)


def _log(sending: Sending, outcome: Outcome, status: Status, finished_at: float) -> None:
    refusal = None if isinstance(outcome, Accepted) else outcome
    quick_log.log.info(
        "email.attempted",
        email_id=sending.email_id,
        attempt=sending.attempt_number,
        provider=sending.provider,
        outcome=outcome_name(outcome),
        status=str(status),
        error_type=refusal and refusal.reason.value,
        provider_code=refusal and refusal.code,
        duration_ms=round((finished_at - sending.started_at) * 1000, 1),
        correlation_id=sending.lease.correlation_id,
        trace_id=sending.lease.trace_id,
    )


def _trace(sending: Sending, outcome: Outcome, finished_at: float) -> None:
    TRACER.add_attempt(
        Attempted(
            traceparent=sending.lease.traceparent,
            started_at=sending.started_at,
            finished_at=finished_at,
            email_id=sending.email_id,
            attempt_number=sending.attempt_number,
            provider=sending.provider,
            outcome=outcome_name(outcome),
            error_type=None if isinstance(outcome, Accepted) else outcome.reason.value,
        )
    )
