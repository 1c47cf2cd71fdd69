"""The ceilings of a recipient domain hold over two hosts, and delay no email to another domain."""

from __future__ import annotations

from uuid import UUID

import psycopg
import pytest

from tests.acceptance.harness import Host, Sink, emails, stop
from tests.supervisor.program import Program, eventually

LIMITED = 60
OTHERS = 600


def run_two_hosts(host: Host) -> list[Program]:
    """Two hosts, each with two workers and its own run directory."""
    return [host.run(RUN_DIR=host.folder / f"run-{name}", HOST_NAME=name) for name in ("one", "two")]


def limited_to(*values: str, host: Host) -> None:
    assert host.command("domains", "set", "limited.example", *values).await_exit() == 0


def enqueue(host: Host) -> tuple[set[UUID], set[UUID]]:
    """Enqueues emails to a domain with a ceiling, and after them emails to another one."""
    limited = host.enqueue(emails(LIMITED, name="limited", to=lambda number: f"c{number}@limited.example"))
    return limited, host.enqueue(emails(OTHERS, name="other"))


def began(sink: Sink, ids: set[UUID]) -> list[float]:
    """When the server got the first octet of each of these emails, in order."""
    started: dict[int, float] = {}
    found = []
    for event in sink.witnessed():
        if event["event"] == "began":
            started[event["connection"]] = event["at"]
        elif event["event"] == "read" and UUID(event["email_id"]) in ids:
            found.append(started[event["connection"]])
    return sorted(found)


def most_at_once(sink: Sink, ids: set[UUID]) -> int:
    """The most of these emails that the server was receiving at the same time."""
    changes: list[tuple[float, int]] = []
    open_at: dict[int, float] = {}
    is_ours: set[int] = set()
    for event in sink.witnessed():
        connection = event["connection"]
        if event["event"] == "began":
            open_at[connection] = event["at"]
        elif event["event"] == "read" and UUID(event["email_id"]) in ids:
            is_ours.add(connection)
        elif event["event"] == "answered" and connection in is_ours:
            is_ours.remove(connection)
            changes += [(open_at[connection], 1), (event["at"], -1)]
    most = running = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


@pytest.mark.slow
def test_a_rate_holds_over_two_hosts_and_its_removal_lets_the_rest_go(host: Host) -> None:
    rate = 5.0
    sink = host.sink("--wire")
    limited_to("--per-second", f"{rate:g}", host=host)
    runs = run_two_hosts(host)
    host.await_consumers(4)

    limited, others = enqueue(host)

    eventually(lambda: others <= host.recipient.delivered().keys(), "emails to the other domain")
    assert len(began(sink, limited)) < LIMITED // 2, "they were not delayed by those that wait"
    eventually(lambda: len(began(sink, limited)) >= LIMITED // 2, "half of the emails")
    times = began(sink, limited)
    burst = 0.5 * rate + 4  # half a second's worth, and a token of each worker
    for first in range(len(times)):
        for last in range(first, len(times)):
            assert last - first + 1 <= burst + rate * (times[last] - times[first] + 0.2)
    assert times[-1] - times[0] < 2 * len(times) / rate, "the rate is used"
    shown = host.command("show", str(waiting(host)[-1]))
    assert shown.await_exit() == 0
    assert "limited.example may get 5 emails per second" in " ".join(shown.log.split())

    assert host.command("domains", "remove", "limited.example").await_exit() == 0
    eventually(lambda: not waiting(host), "the end of all waits", seconds=3)
    books = host.await_finished(limited | others)

    assert books.counts == {"sent": LIMITED + OTHERS}
    assert set(host.recipient.delivered().values()) == {1}
    for run in runs:
        stop(run)


def waiting(host: Host) -> list[UUID]:
    """The waiting emails; the one that waits longest is the last."""
    with psycopg.connect(host.database_url) as connection:
        statement = "select email_id from email_log where status = 'waiting' order by wait_until"
        return [row[0] for row in connection.execute(statement)]


@pytest.mark.slow
def test_the_number_of_attempts_at_the_same_time_holds_over_two_hosts_even_if_one_is_killed(host: Host) -> None:
    sink = host.sink("--wire", "--latency-ms", "50")
    limited_to("--concurrent", "2", host=host)
    first, second = run_two_hosts(host)
    host.await_consumers(4)

    limited, others = enqueue(host)

    eventually(lambda: others <= host.recipient.delivered().keys(), "emails to the other domain")
    assert len(began(sink, limited)) < LIMITED // 2, "they were not delayed by those that wait"
    first.destroy()
    sent = len(limited & host.recipient.delivered().keys())
    eventually(
        lambda: len(limited & host.recipient.delivered().keys()) > sent + 10, "emails of the other host", seconds=60
    )
    assert most_at_once(sink, limited) <= 2
    first = host.run(RUN_DIR=host.folder / "run-one", HOST_NAME="one")
    books = host.await_finished(limited | others, seconds=120)

    assert books.counts.keys() <= {"sent", "held"}  # the crash interrupted some emails on the wire
    assert books.counts["sent"] >= LIMITED + OTHERS - 16
    assert most_at_once(sink, limited) <= 2
    assert set(host.recipient.delivered().values()) == {1}
    with psycopg.connect(host.database_url) as connection:
        assert connection.execute("select count(*) from email_log where status = 'waiting'").fetchone() == (0,)
    for run in (first, second):
        stop(run)
