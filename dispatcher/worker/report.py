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
    """Logs an attempt that has ended, and adds a span if tracing is on. `status`: the email's status after the attempt.
    `finished_at`: in Unix seconds."""
    refusal = None if isinstance(outcome, Accepted) else outcome
    name = outcome_name(outcome)
    quick_log.log.info(
        "email.attempted",
        email_id=email.lease.email_id,
        attempt=email.attempt_number,
        provider=email.provider,
        outcome=name,
        status=str(status),
        error_type=refusal and refusal.reason.value,
        provider_code=refusal and refusal.code,
        duration_ms=round((finished_at - email.started_at) * 1000, 1),
        correlation_id=email.lease.correlation_id,
        trace_id=email.lease.trace_id,
    )
    if TRACER.is_on:
        TRACER.add_attempt(
            FinishedAttempt(
                traceparent=email.lease.traceparent,
                started_at=email.started_at,
                finished_at=finished_at,
                email_id=email.lease.email_id,
                attempt_number=email.attempt_number,
                provider=email.provider,
                outcome=name,
                error_type=None if refusal is None else refusal.reason.value,
            )
        )


def report_lease(emails: int, seconds: float) -> None:
    """Adds a lease statement to the metrics: how many emails it tried to lease, and how long it took."""
    metrics.LEASE_EMAILS.observe(emails)
    metrics.LEASE_SECONDS.observe(seconds)


def report_record(batch: Sequence[EndedAttempt], seconds: float) -> None:
    """Adds a committed record statement and its results to the metrics."""
    if not metrics.ATTEMPTS.is_bound:
        return
    metrics.RECORD_EMAILS.observe(len(batch))
    metrics.RECORD_SECONDS.observe(seconds)
    results = [ended.result for ended in batch]
    # Nearly all emails are accepted. Count these emails separately, by a key with one part instead of four, to save
    # time.
    for provider, count in Tally(result.provider for result in results if result.outcome == ACCEPTED).items():
        metrics.ATTEMPTS.add(count, provider, ACCEPTED, "none")
        metrics.EMAILS.add(count, provider, ACCEPTED)
    _count_unaccepted([result for result in results if result.outcome != ACCEPTED])
    send_seconds: dict[str, list[float]] = defaultdict(list)
    for result in results:
        send_seconds[result.provider].append((result.finished_at - result.started_at).total_seconds())
    for provider, values in send_seconds.items():
        metrics.SEND_SECONDS.observe_all(values, provider)
    metrics.END_TO_END_SECONDS.observe_all(
        (ended.result.finished_at - ended.email.lease.due_since).total_seconds()
        for ended in batch
        if ended.result.outcome == ACCEPTED and ended.email.lease.due_since is not None
    )


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
