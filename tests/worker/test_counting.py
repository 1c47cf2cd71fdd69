"""A worker's metrics, and what it reports to its parent, agree with what it did."""

from __future__ import annotations

from typing import Final

from dispatcher.domain.outcome import Deferred, Reason, Uncertain
from dispatcher.telemetry import metrics
from tests.recovery.tally import counted
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import answer

ATTEMPTS: Final = {
    "attempts": metrics.ATTEMPTS,
    "emails": metrics.EMAILS,
    "retries": metrics.RETRIES,
    "held": metrics.HELD,
}
TIMED: Final = {
    "leases": metrics.LEASE_EMAILS,
    "lease_seconds": metrics.LEASE_SECONDS,
    "records": metrics.RECORD_EMAILS,
    "record_seconds": metrics.RECORD_SECONDS,
    "send_seconds": metrics.SEND_SECONDS,
    "end_to_end_seconds": metrics.END_TO_END_SECONDS,
}


async def test_attempts_retries_and_emails_are_counted_by_outcome(bench: Bench) -> None:
    greylisted, silent, _ = email_ids = bench.books.enqueue(3)
    bench.provider.script[greylisted].append(answer(Deferred(Reason.RECIPIENT_DEFERRED)))
    bench.provider.script[silent].append(answer(Uncertain("silence")))

    with counted(ATTEMPTS) as counts, counted(TIMED) as timed:
        await bench.start()
        await bench.deliver(email_ids)
        await bench.settled({"sent": 2, "held": 1})
        await bench.nothing_left_on_the_queue()

    assert counts == {
        ("attempts", "scripted", "deferred", "recipient_deferred"): 1,
        ("attempts", "scripted", "accepted", "none"): 2,
        ("attempts", "scripted", "uncertain", "outcome_unknown"): 1,
        ("retries", "scripted"): 1,
        ("emails", "scripted", "accepted"): 2,
        ("emails", "scripted", "uncertain"): 1,
        ("held", "no_answer"): 1,
    }
    assert {name for (name, *_), count in timed.items() if count} == TIMED.keys()


async def test_a_worker_reports_when_it_is_up_its_in_flight_emails_and_the_time_of_its_last_ack(bench: Bench) -> None:
    with counted({"in_flight": metrics.IN_FLIGHT}) as counts:
        worker, _ = await bench.begin(3)
        await until(lambda: counts == {("in_flight",): 3})
        before = worker.process_table.statuses()[0].served_seconds
        bench.provider.let_go()
        await until(lambda: not counts["in_flight",])

    assert before is None
    assert worker.process_table.statuses()[0].served_seconds is not None
