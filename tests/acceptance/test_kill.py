"""SIGKILL of any process at any time: nothing is lost or sent twice, and only in-flight emails are held.

The lease lasts 300 s in all of these tests. So if a lease is settled within seconds, the relay has settled it from the
in-flight ledger. The lease has not expired.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from datetime import UTC, datetime

import pytest

from tests.acceptance.harness import CONNECTIONS, WORKERS, Host, emails, stop
from tests.supervisor.program import Program, eventually, is_alive

SETTLED_SECONDS = 30.0
"""Enough for a busy machine, and far less than the lease of 300 seconds."""
PROMISED_SECONDS = 2.0
"""The longest time from a kill until all of the worker's leases are settled."""


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
    ids = host.enqueue(emails(800))  # enough that work is left when the worker is killed
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
    assert books.count("sent") == 800 - books.count("held")
    # The killed worker had leased some emails that it had not started. The other worker sent these before the leases
    # expired.
    assert settled["released"] > 0
    assert not list(host.run_dir.glob("*.ledger"))


def test_a_worker_that_is_killed_while_idle_holds_nothing(host: Host) -> None:
    run = host.run()
    host.await_ledger(victim := run.pid_of("worker 0"))
    first = host.enqueue(emails(50, name="first"))
    host.await_finished(first)

    os.kill(victim, signal.SIGKILL)

    run.await_events("ledger.settled", seconds=SETTLED_SECONDS)
    second = host.enqueue(emails(50, name="second"))
    books = host.await_finished(first | second)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 100}


def test_the_leases_of_a_killed_worker_are_settled_within_two_seconds(host: Host) -> None:
    # The worker puts all emails on the wire, and gets no answer before the kill.
    host.sink("--latency-ms", "60000")
    run = host.run(WORKERS=1, ON_UNCERTAIN="hold")
    took = []
    for kill in range(3):
        ids = host.enqueue(emails(CONNECTIONS, name=f"kill-{kill}"))
        host.await_delivered(CONNECTIONS * (kill + 1))
        victim = run.pid_of("worker 0")

        killed_at = datetime.now(UTC)
        os.kill(victim, signal.SIGKILL)

        settled = run.await_events("ledger.settled", kill + 1, seconds=SETTLED_SECONDS)
        took.append((datetime.fromisoformat(settled["timestamp"]) - killed_at).total_seconds())
        assert host.await_finished(ids).count("held") == CONNECTIONS
    stop(run)

    # Only the fastest of the three recoveries counts, because the machine may stall briefly.
    assert min(took) < PROMISED_SECONDS, took


@pytest.mark.slow
@pytest.mark.parametrize("bundle", [1, 16])
def test_workers_killed_repeatedly_lose_and_repeat_nothing(host: Host, bundle: int) -> None:
    host.sink("--latency-ms", "10")
    ids = host.enqueue(emails(800))
    run = host.run(BUNDLE_EMAILS=bundle)

    for kill in range(6):
        host.await_delivered(60 * (kill + 1))
        os.kill(run.pid_of(f"worker {kill % WORKERS}"), signal.SIGKILL)

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.count("held") <= 6 * CONNECTIONS
    assert books.count("sent") + books.count("held") == 800


def bundles_on_the_queue(host: Host, run: Program, least: int) -> list[int]:
    """The number of emails in each ready message. The messages wait because the workers' prefetch windows are full."""
    pids = [run.pid_of(f"worker {number}") for number in range(WORKERS)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # otherwise the queue changes before the check
    try:
        eventually(lambda: host.rabbit.waiting(host.topology.queue) >= least, f"{least} ready messages")
        return [message.body.count(b"email_id") for message in host.rabbit.read_all(host.topology.queue)]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_workers_killed_or_disconnected_with_bundles_lose_and_repeat_nothing(host: Host) -> None:
    bundle, window = 16, 2  # with so small a window, workers count as fast also on a busy machine
    host.sink("--latency-ms", "10")
    run = host.run(BUNDLE_EMAILS=bundle, PREFETCH=window)
    pids = [run.pid_of(f"worker {number}") for number in range(WORKERS)]
    eventually(lambda: len(host.rabbit.connections_of(pids)) == WORKERS, "connections to close")
    ids = host.enqueue(emails(2000))
    host.await_delivered(1200)  # emails share messages only after the relay has seen how fast workers take them
    assert 2 < max(bundles_on_the_queue(host, run, least=1)) <= bundle

    host.rabbit.close_connections_of(pids)
    run.await_events("broker.connection_lost", WORKERS)
    for kill in range(4):
        host.await_delivered(1300 + 100 * kill)
        os.kill(run.pid_of(f"worker {kill % WORKERS}"), signal.SIGKILL)

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.count("held") == settlements(run)["uncertain"] <= 4 * CONNECTIONS
    assert books.count("sent") + books.count("held") == 2000


def test_a_killed_relay_is_replaced_and_nothing_is_lost(host: Host) -> None:
    run = host.run()
    sets = []
    for number in range(4):
        # The previous process has exited, so `pid_of` returns its successor.
        run.await_events("relay.leading", number + 1)
        sets.append(host.enqueue(emails(200, name=f"set-{number}")))
        os.kill(run.pid_of("relay"), signal.SIGKILL)

    books = host.await_finished(set().union(*sets))

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 800}


def test_relay_and_worker_killed_together_are_settled_by_the_next_relay(host: Host) -> None:
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(300))
    run = host.run()
    host.await_ledger(victim := run.pid_of("worker 0"))
    host.await_delivered(50)

    for pid in (victim, run.pid_of("relay")):
        os.kill(pid, signal.SIGKILL)

    run.await_events("ledger.settled", seconds=SETTLED_SECONDS)
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.count("held") <= CONNECTIONS


def test_children_of_a_killed_parent_drain_and_a_new_run_finishes(host: Host) -> None:
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(500))
    run = host.run()
    host.await_delivered(100)

    run.send(signal.SIGKILL)

    run.await_exit()
    run.await_all_ended(20)
    left = host.books(ids)
    assert left.count("sending") == left.count("held") == 0
    assert not list(host.run_dir.glob("*.ledger"))
    second = host.run()
    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    assert books.counts == {"sent": 500}


def test_a_new_run_leaves_an_orphaned_worker_alone(host: Host) -> None:
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(200))
    run = host.run()
    host.await_ledger(orphan := run.pid_of("worker 0"))
    host.await_delivered(50)
    os.kill(orphan, signal.SIGSTOP)  # frozen, as if its provider was slow
    run.send(signal.SIGKILL)
    run.await_exit()

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
    assert books.count("sent") + books.count("held") == 200


def test_a_killed_process_group_is_settled_by_the_next_run(host: Host) -> None:
    host.sink("--latency-ms", "20")
    ids = host.enqueue(emails(500))
    run = host.run()
    for number in range(WORKERS):
        host.await_ledger(run.pid_of(f"worker {number}"))
    host.await_delivered(100)

    run.send_all(signal.SIGKILL)

    run.await_exit()
    eventually(lambda: not run.members())
    second = host.run()
    second.await_events("ledger.settled", WORKERS, seconds=SETTLED_SECONDS)
    books = host.await_finished(ids)
    stop(second)
    books.assert_balanced()
    assert books.count("held") <= WORKERS * CONNECTIONS
    assert books.count("sent") + books.count("held") == 500


@pytest.mark.slow
def test_a_hundred_kills_of_any_process_lose_and_repeat_nothing(host: Host) -> None:
    host.sink("--latency-ms", "5")
    ids = host.enqueue(emails(8000))
    roles = [f"worker {number}" for number in range(4)] + ["relay"]
    killed_workers = 0

    # The parent waits longer before each restart of a role. So the test sometimes starts a new parent.
    for _ in range(5):
        run = host.run(WORKERS=4)
        for kill in range(20):
            delivered = len(host.recipient.delivered())
            if len(ids) - delivered < 1000:  # on a slow machine, many are sent between two kills
                ids |= host.enqueue(emails(1000, name=f"more-{len(ids)}"))
            host.await_delivered(delivered + 20)
            role = roles[kill % len(roles)]
            os.kill(run.pid_of(role), signal.SIGKILL)
            killed_workers += role != "relay"
        stop(run)

    run = host.run()
    books = host.await_finished(ids, seconds=60)
    stop(run)
    books.assert_balanced()
    assert books.count("held") <= killed_workers * CONNECTIONS
    assert books.count("sent") + books.count("held") == len(ids)
