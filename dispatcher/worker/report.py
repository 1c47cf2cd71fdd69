"""A worker's telemetry: a log line and a span per attempt, metrics per batch."""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from dispatcher.domain.outcome import Accepted, Outcome, outcome_name
from dispatcher.domain.status import Status
from dispatcher.store.leases import Result
from dispatcher.telemetry import metrics, quick_log
from dispatcher.telemetry.finished_attempt import FinishedAttempt
from dispatcher.telemetry.tracing import TRACER
from dispatcher.worker.in_flight_email import EndedAttempt, InFlightEmail

ACCEPTED: Final = "accepted"


def report_attempt(email: InFlightEmail, outcome: Outcome, status: Status, finished_at: float) -> None:
    """Logs an attempt that has ended, and adds a span if tracing is on."""
    refusal = None if isinstance(outcome, Accepted) else outcome
    error_type = None if refusal is None else refusal.reason.value
    name, lease, number, provider = outcome_name(outcome), email.lease, email.attempt_number, email.provider
    quick_log.log.info(
        "email.attempted",
        {
            "email_id": lease.email_id,
            "attempt": number,
            "provider": provider,
            "outcome": name,
            "status": str(status),
            "error_type": error_type,
            "provider_code": refusal and refusal.code,
            "duration_ms": int((finished_at - email.started_at) * 10_000 + 0.5) / 10,  # faster than `round`
            "correlation_id": lease.correlation_id,
            "trace_id": lease.trace_id,
        },
    )
    if TRACER.is_on:
        TRACER.add_attempt(
            FinishedAttempt(
                lease.traceparent, email.started_at, finished_at, lease.email_id, number, provider, name, error_type
            )
        )


def report_record(batch: Sequence[EndedAttempt], seconds: float) -> None:
    if not metrics.ATTEMPTS.is_bound:
        return
    metrics.RECORD_EMAILS.observe(len(batch))
    metrics.RECORD_SECONDS.observe(seconds)
    unaccepted: list[Result] = []
    send_seconds: dict[str, list[float]] = defaultdict(list)
    end_to_end_seconds: list[float] = []
    for email, result, _ in batch:
        finished_at = result.finished_at
        send_seconds[result.provider].append((finished_at - result.started_at).total_seconds())
        if result.outcome != ACCEPTED:
            unaccepted.append(result)
        elif (due_since := email.lease.due_since) is not None:
            end_to_end_seconds.append((finished_at - due_since).total_seconds())
    refused = Tally(result.provider for result in unaccepted)
    for provider, values in send_seconds.items():
        if accepted := len(values) - refused[provider]:
            metrics.ATTEMPTS.add(accepted, provider, ACCEPTED, "none")
            metrics.EMAILS.add(accepted, provider, ACCEPTED)
        metrics.SEND_SECONDS.observe_all(values, provider)
    _count_unaccepted(unaccepted)
    metrics.END_TO_END_SECONDS.observe_all(end_to_end_seconds)


def _count_unaccepted(results: Sequence[Result]) -> None:
    kinds = Tally((r.provider, r.outcome, r.error_type or "none", r.status) for r in results)
    for (provider, outcome, error_type, status), count in kinds.items():
        metrics.ATTEMPTS.add(count, provider, outcome, error_type)
        if status is Status.SENDING:
            metrics.RETRIES.add(count, provider)
        elif status is Status.WAITING:
            metrics.REDELIVERIES.add(count, provider)
        elif status is not Status.PENDING:
            metrics.EMAILS.add(count, provider, outcome)
        if status is Status.HELD:
            metrics.HELD.add(count, "no_answer")
