"""Leases under real processes: renewed while a send is slow, lost when a worker freezes, expired when a host goes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.acceptance.harness import CONNECTIONS, WORKERS, Host, emails, stop
from tests.supervisor.program import eventually

# Leases are seconds longer than a busy machine lets a process stand still: only what a test does ends one.


def test_a_send_that_outlasts_its_lease_keeps_it(host: Host) -> None:
    host.sink("--latency-ms", "8500")
    ids = host.enqueue(emails(CONNECTIONS))
    run = host.run(LEASE_SECONDS=7)

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": CONNECTIONS}
    assert not run.events("email.recovered")
    assert not run.events("email.lease_lost")


def test_a_worker_that_freezes_past_its_lease_sends_nothing_twice_when_it_goes_on(host: Host) -> None:
    host.sink("--latency-ms", "100")
    run = host.run(LEASE_SECONDS=5, PREFETCH=30, HANG_SECONDS=0)
    host.await_consumers()
    ids = host.enqueue(emails(600))  # so that it has much to do still, however late it freezes
    host.await_work(frozen := run.pid_of("worker 0"))

    os.kill(frozen, signal.SIGSTOP)
    run.await_events("ledger.settled", reason="worker_frozen")
    eventually(lambda: not any(row.status == "sending" for row in host.rows().values()))
    os.kill(frozen, signal.SIGCONT)

    books = host.await_finished(ids)
    stop(run)
    books.assert_harmless()
    # Leases end one after another, so it may take several looks: the first may find nothing but answers.
    assert sum(event["released"] for event in run.events("ledger.settled", reason="worker_frozen")) > 0
    assert not run.events("email.recovered")
    assert books.count("sent") + books.count("held") == 600
    # What was on the wire, and no more of all that it had leased; an acceptance that comes late still proves `sent`.
    assert books.count("held") <= CONNECTIONS


def test_leases_of_a_host_that_is_gone_are_judged_by_the_others(host: Host) -> None:
    sink = host.sink("--latency-ms", "400")  # so that there are leases, however late it goes
    ids = host.enqueue(emails(300))
    gone = host.run(LEASE_SECONDS=3, PREFETCH=20, RUN_DIR=host.folder / "gone")
    host.await_delivered(20)

    gone.send_all(signal.SIGKILL)
    gone.await_exit()
    sink.become()
    other = host.run(LEASE_SECONDS=6, RUN_DIR=host.folder / "other")

    books = host.await_finished(ids)
    stop(other)
    books.assert_balanced()
    assert books.count("sent") + books.count("held") == 300
    assert 0 < books.count("held") <= WORKERS * 20


@pytest.mark.slow
def test_a_host_that_comes_back_late_proves_what_it_sent(host: Host) -> None:
    sink = host.sink("--latency-ms", "400")  # so that there are leases, however late it goes
    ids = host.enqueue(emails(300))
    gone = host.run(LEASE_SECONDS=3, PREFETCH=20, RUN_DIR=host.folder / "gone")
    host.await_delivered(20)
    gone.send_all(signal.SIGKILL)
    gone.await_exit()
    sink.become()
    other = host.run(LEASE_SECONDS=6, RUN_DIR=host.folder / "other")
    before = host.await_finished(ids)

    back = host.run(LEASE_SECONDS=3, RUN_DIR=host.folder / "gone")

    back.await_events("ledger.settled", WORKERS)
    after = host.await_finished(ids)  # what had not left is pending again, and is sent
    stop(back)
    stop(other)
    after.assert_harmless()
    assert after.by_status.get("held", frozenset()) <= before.by_status.get("held", frozenset())
