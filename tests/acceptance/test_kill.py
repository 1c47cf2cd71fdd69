"""SIGKILL of any process at any time: nothing is lost or sent twice, and only in-flight emails are held.

Unless a test says otherwise, the lease lasts 300 s. So if a lease is settled within seconds, the relay has settled it
from the in-flight ledger. The lease has not expired.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from typing import Any

from tests.acceptance.harness import CONNECTIONS, WORKERS, Double, Host, emails, stop
from tests.supervisor.program import Program, eventually, is_alive

SETTLED_SECONDS = 30.0
"""Enough for a busy machine, and far less than the lease of 300 seconds."""
CALL_EMAILS = 25


def settlements(run: Program) -> Counter[str]:
    """How often the relay took each action on the ledgers of dead workers, over all checks."""
    totals: Counter[str] = Counter()
    for event in run.events("ledger.settled"):
        totals.update({name: event[name] for name in ("released", "recorded", "uncertain")})
    return totals


def test_a_killed_worker_affects_only_in_flight_emails(host: Host) -> None:
    host.sink("--latency-ms", "100")
    run = host.run()
    host.await_consumers()
    ids = host.enqueue(emails(400))  # enough that work is left when the worker is killed
    host.await_work(victim := run.pid_of("worker 0"))

    os.kill(victim, signal.SIGKILL)

    run.await_events("ledger.settled", seconds=SETTLED_SECONDS)
    eventually(lambda: not host.leased_by(victim), "the end of its leases")
    books = host.await_finished(ids)
    stop(run)
    settled = settlements(run)
    books.assert_balanced()
    assert books.count("held") <= CONNECTIONS
    assert books.count("held") == settled["uncertain"]
    assert books.count("sent") == 400 - books.count("held")
    # The killed worker had leased some emails that it had not started. The other worker sent these before the leases
    # expired.
    assert settled["released"] > 0
    assert not list(host.run_dir.glob("*.ledger"))


def test_children_of_a_killed_parent_drain_and_a_new_run_leaves_an_orphan_alone_and_sends_the_rest(host: Host) -> None:
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(500))
    run = host.run()
    for number in range(WORKERS):
        host.await_ledger(run.pid_of(f"worker {number}"))
    orphan = run.pid_of("worker 0")
    host.await_delivered(50)
    os.kill(orphan, signal.SIGSTOP)  # frozen, as if its provider was slow

    run.send(signal.SIGKILL)

    run.await_exit()
    eventually(lambda: run.members() == [orphan], "the drain of the others", seconds=20)
    left = host.books(ids)
    assert left.count("sending") == len(host.leased_by(orphan))
    assert left.count("held") == 0
    assert len(list(host.run_dir.glob("*.ledger"))) == 1
    second = host.run()
    victim = second.pid_of("worker 0")
    host.await_ledger(victim)
    os.kill(victim, signal.SIGKILL)
    settled = second.await_events("ledger.settled", seconds=SETTLED_SECONDS)
    # The relay has read both ledgers, but settled only the ledger of the dead worker.
    assert f":{victim}:" in settled["worker"]
    assert len(second.events("ledger.settled")) == 1
    assert list(host.run_dir.glob(f"*:{orphan}:*.ledger"))
    os.kill(orphan, signal.SIGCONT)
    books = host.await_finished(ids)
    eventually(lambda: not is_alive(orphan))
    stop(second)
    books.assert_balanced()
    assert books.count("held") <= CONNECTIONS
    assert books.count("sent") + books.count("held") == 500


# In the next two tests, leases are seconds longer than any stall of a process on a busy machine. So a lease expires
# only if the test causes it.


def test_a_worker_frozen_past_its_leases_sends_nothing_twice_when_it_continues(host: Host) -> None:
    host.sink("--latency-ms", "100")
    run = host.run(LEASE_SECONDS=5, PREFETCH=30, HANG_SECONDS=0)
    host.await_consumers()
    ids = host.enqueue(emails(400))  # enough that work is left when the worker freezes
    host.await_work(frozen := run.pid_of("worker 0"))

    os.kill(frozen, signal.SIGSTOP)
    run.await_events("ledger.settled", reason="worker_frozen")
    eventually(lambda: not any(row.status == "sending" for row in host.rows().values()))
    os.kill(frozen, signal.SIGCONT)

    books = host.await_finished(ids)
    stop(run)
    books.assert_harmless()
    # Leases expire one after another, so the relay may need several checks. The first check may find only emails that
    # the provider has already answered, and the relay does not release such emails.
    assert sum(event["released"] for event in run.events("ledger.settled", reason="worker_frozen")) > 0
    assert not run.events("email.recovered")
    assert books.count("sent") + books.count("held") == 400
    # Only in-flight emails are held, not all emails that the worker had leased. A late acceptance still proves `sent`.
    assert books.count("held") <= CONNECTIONS


def test_leases_of_a_lost_host_are_recovered_by_another_and_its_ledgers_prove_later_what_it_sent(host: Host) -> None:
    sink = host.sink("--latency-ms", "400")  # slow, so that the host still has leases when it is killed
    ids = host.enqueue(emails(300))
    lost = host.run(LEASE_SECONDS=3, PREFETCH=20, RUN_DIR=host.folder / "gone")
    host.await_delivered(20)

    lost.send_all(signal.SIGKILL)
    lost.await_exit()
    sink.become()
    other = host.run(LEASE_SECONDS=6, RUN_DIR=host.folder / "other")

    before = host.await_finished(ids)
    before.assert_balanced()
    assert before.count("sent") + before.count("held") == 300
    assert 0 < before.count("held") <= WORKERS * 20
    back = host.run(LEASE_SECONDS=3, RUN_DIR=host.folder / "gone")
    back.await_events("ledger.settled", WORKERS)
    after = host.await_finished(ids)  # unsent emails become pending again, and are sent
    stop(back)
    stop(other)
    after.assert_harmless()
    assert after.by_status.get("held", frozenset()) <= before.by_status.get("held", frozenset())


def test_a_killed_worker_holds_the_emails_of_its_bulk_calls_and_nothing_else(host: Host, double: Double) -> None:
    # The double accepts immediately and answers seconds later. So the kill comes before the answer, even on a slow
    # machine.
    double.behave(latency_ms=4000)
    template: dict[str, Any] = {"subject": "", "text": None, "template_id": "d-1", "template_data": {"order": 1}}
    ids = host.enqueue(replace(each, **template) for each in emails(200))
    run = host.run(BULK_CALL_EMAILS=CALL_EMAILS, PREFETCH=100)
    victim = run.pid_of("worker 0")
    eventually(lambda: host.leased_by(victim) & double.delivered().keys(), "calls on the wire")

    os.kill(victim, signal.SIGKILL)

    run.await_events("ledger.settled")
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    held = books.by_status["held"]
    assert len(held) == settlements(run)["uncertain"] > 1
    assert books.count("sent") == 200 - len(held)
    assert max(request["together"] for request in double.requests()) == CALL_EMAILS
