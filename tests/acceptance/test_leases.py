"""Real processes renew leases during a slow send, and lose leases while a worker is frozen. If a host is lost, its
leases expire."""

from __future__ import annotations

import os
import signal

import pytest

from tests.acceptance.harness import CONNECTIONS, WORKERS, Host, emails, stop
from tests.supervisor.program import eventually

# Leases are seconds longer than any stall of a process on a busy machine. So a lease expires only if a test causes it.


def test_a_send_that_takes_longer_than_its_lease_keeps_the_lease(host: Host) -> None:
    host.sink("--latency-ms", "8500")
    ids = host.enqueue(emails(CONNECTIONS))
    run = host.run(LEASE_SECONDS=7)

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": CONNECTIONS}
    assert not run.events("email.recovered")
    assert not run.events("email.lease_lost")


def test_a_worker_frozen_past_its_leases_sends_nothing_twice_when_it_continues(host: Host) -> None:
    host.sink("--latency-ms", "100")
    run = host.run(LEASE_SECONDS=5, PREFETCH=30, HANG_SECONDS=0)
    host.await_consumers()
    ids = host.enqueue(emails(600))  # enough that work is left when the worker freezes
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
    assert books.count("sent") + books.count("held") == 600
    # Only in-flight emails are held, not all emails that the worker had leased. A late acceptance still proves `sent`.
    assert books.count("held") <= CONNECTIONS


def test_leases_of_a_lost_host_are_recovered_by_other_hosts(host: Host) -> None:
    sink = host.sink("--latency-ms", "400")  # slow, so that the host still has leases when it is killed
    ids = host.enqueue(emails(300))
    lost = host.run(LEASE_SECONDS=3, PREFETCH=20, RUN_DIR=host.folder / "gone")
    host.await_delivered(20)

    lost.send_all(signal.SIGKILL)
    lost.await_exit()
    sink.become()
    other = host.run(LEASE_SECONDS=6, RUN_DIR=host.folder / "other")

    books = host.await_finished(ids)
    stop(other)
    books.assert_balanced()
    assert books.count("sent") + books.count("held") == 300
    assert 0 < books.count("held") <= WORKERS * 20


@pytest.mark.slow
def test_a_host_that_returns_late_proves_what_it_sent(host: Host) -> None:
    sink = host.sink("--latency-ms", "400")  # slow, so that the host still has leases when it is killed
    ids = host.enqueue(emails(300))
    lost = host.run(LEASE_SECONDS=3, PREFETCH=20, RUN_DIR=host.folder / "gone")
    host.await_delivered(20)
    lost.send_all(signal.SIGKILL)
    lost.await_exit()
    sink.become()
    other = host.run(LEASE_SECONDS=6, RUN_DIR=host.folder / "other")
    before = host.await_finished(ids)

    back = host.run(LEASE_SECONDS=3, RUN_DIR=host.folder / "gone")

    back.await_events("ledger.settled", WORKERS)
    after = host.await_finished(ids)  # unsent emails become pending again, and are sent
    stop(back)
    stop(other)
    after.assert_harmless()
    assert after.by_status.get("held", frozenset()) <= before.by_status.get("held", frozenset())
