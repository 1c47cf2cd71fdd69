"""What a worker's batches add to the metrics: one pass per batch, and a write per word or bucket, not per email."""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dispatcher.domain.status import Status
from dispatcher.telemetry import metrics

ACCEPTED: Final = "accepted"

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
    results = [closing.result for closing in batch]
    _measure_accepted(results)
    _measure_others([result for result in results if result.outcome != ACCEPTED])
    _measure_send_seconds(results)
    metrics.END_TO_END_SECONDS.observe_all(
        (closing.result.finished_at - closing.sending.lease.created_at).total_seconds()
        for closing in batch
        if closing.result.outcome == ACCEPTED and closing.sending.lease.created_at is not None
    )


def _measure_accepted(results: Sequence[Result]) -> None:
    # Apart, because it is what nearly all are: a key of one word, where the others' takes four.
    for provider, count in Tally(result.provider for result in results if result.outcome == ACCEPTED).items():
        metrics.ATTEMPTS.add(count, provider, ACCEPTED, "none")
        metrics.EMAILS.add(count, provider, ACCEPTED)


def _measure_others(results: Sequence[Result]) -> None:
    kinds = Tally((r.provider, r.outcome, r.error_type or "none", r.status) for r in results)
    for (provider, outcome, error_type, status), count in kinds.items():
        metrics.ATTEMPTS.add(count, provider, outcome, error_type)
        if status is Status.SENDING:
            metrics.RETRIES.add(count, provider)
        elif status is not Status.PENDING:
            metrics.EMAILS.add(count, provider, outcome)
        if status is Status.HELD:
            metrics.HELD.add(count, "no_answer")


def _measure_send_seconds(results: Sequence[Result]) -> None:
    seconds: dict[str, list[float]] = defaultdict(list)
    for result in results:
        seconds[result.provider].append((result.finished_at - result.started_at).total_seconds())
    for provider, values in seconds.items():
        metrics.SEND_SECONDS.observe_all(values, provider)
