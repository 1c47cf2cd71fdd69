"""What a worker's batches add to the metrics: one pass per batch, and a write per word or bucket, not per email."""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dispatcher.domain.status import Status
from dispatcher.telemetry import metrics

if TYPE_CHECKING:
    from dispatcher.store.leases import Result
    from dispatcher.worker.recorder import Closing


def measure_lease(emails: int, seconds: float) -> None:
    """A lease statement ended.

    Args:
        emails: How many it asked for.
    """
    metrics.LEASE_EMAILS.observe(emails)
    metrics.LEASE_SECONDS.observe(seconds)


def measure_record(batch: Sequence[Closing], seconds: float) -> None:
    """A record statement was committed."""
    if not metrics.ATTEMPTS.is_bound:
        return
    metrics.RECORD_EMAILS.observe(len(batch))
    metrics.RECORD_SECONDS.observe(seconds)
    _measure_attempts([closing.result for closing in batch])
    metrics.END_TO_END_SECONDS.observe_all(
        _seconds_since_enqueue(closing)
        for closing in batch
        if closing.result.status is Status.SENT and closing.sending.lease.email is not None
    )


def _measure_attempts(results: Sequence[Result]) -> None:
    for labels, count in Tally((r.provider, r.outcome, r.error_type or "none") for r in results).items():
        metrics.ATTEMPTS.add(count, *labels)
    for (status, provider, outcome), count in Tally((r.status, r.provider, r.outcome) for r in results).items():
        if status is Status.SENDING:
            metrics.RETRIES.add(count, provider)
        elif status is not Status.PENDING:
            metrics.EMAILS.add(count, provider, outcome)
        if status is Status.HELD:
            metrics.HELD.add(count, "no_answer")
    seconds: dict[str, list[float]] = defaultdict(list)
    for result in results:
        seconds[result.provider].append(max(0.0, (result.finished_at - result.started_at).total_seconds()))
    for provider, values in seconds.items():
        metrics.SEND_SECONDS.observe_all(values, provider)


def _seconds_since_enqueue(closing: Closing) -> float:
    # The enqueue's time is the database's; a host whose clock is behind must not take the sum back.
    assert closing.sending.lease.email is not None
    return max(0.0, (closing.result.finished_at - closing.sending.lease.email.created_at).total_seconds())
