"""With redelivery, neither greylisting nor two hours of 503 makes a dead letter or a duplicate.

PostgreSQL's clock is steered, so that minutes and hours of waiting take no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.double import Double
from tests.acceptance.harness import Host, emails, stop
from tests.store.steered_clock import SteeredClock
from tests.supervisor.program import eventually

COUNT = 30
GREYLISTED = "451 4.7.1 Greylisted, try again in five minutes"
QUICK: Final[dict[str, Any]] = {"MAX_ATTEMPTS": 2, "RETRY_BASE_SECONDS": 0.01, "RETRY_CAP_SECONDS": 0.05, "WORKERS": 1}


@pytest.fixture
def sendgrid(tmp_path: Path) -> Iterator[Double]:
    """A SendGrid double for this test."""
    made = Double(tmp_path / "sendgrid")
    yield made
    made.kill()


@pytest.fixture
def clock(host: Host) -> SteeredClock:
    """The clock of the database for `dispatcher run`."""
    return SteeredClock(host.database_url)


def statuses(host: Host) -> Counter[str]:
    return Counter(row.status for row in host.rows().values())


def await_statuses(host: Host, **counts: int) -> None:
    eventually(lambda: statuses(host) == counts, lambda: f"{counts}, not {dict(statuses(host))}")


@pytest.mark.slow
def test_greylisted_emails_are_sent_once_without_a_dead_letter(host: Host, clock: SteeredClock) -> None:
    sink = host.sink()
    sink.behave(script={"rcpt": GREYLISTED})
    run = host.run(**QUICK, DATABASE_URL=clock.url, REDELIVER_FOR="4h")
    ids = host.enqueue(emails(COUNT))
    await_statuses(host, waiting=COUNT)

    clock.set(75)  # after the first wait, the server still greylists
    eventually(lambda: all(row.attempt_count == 2 for row in host.rows().values()), "one attempt per redelivery")
    await_statuses(host, waiting=COUNT)
    sink.behave()
    clock.set(75 + 375)
    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": COUNT}
    assert set(sink.delivered().values()) == {1}
    assert host.rabbit.read_all(host.topology.dlq) == []


@pytest.mark.slow
def test_greylisted_emails_fail_as_ever_without_redelivery(host: Host) -> None:
    sink = host.sink()
    sink.behave(script={"rcpt": GREYLISTED})
    run = host.run(**QUICK)
    ids = host.enqueue(emails(COUNT))

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"failed": COUNT}


@pytest.mark.slow
def test_two_hours_of_503_make_no_dead_letter_and_no_duplicate(
    host: Host, clock: SteeredClock, sendgrid: Double
) -> None:
    host.recipient = sendgrid
    sendgrid.behave(reply={"status": 503})
    run = host.run(**QUICK, DATABASE_URL=clock.url, REDELIVER_FOR="4h")
    ids = host.enqueue(emails(COUNT))
    for minutes in range(15, 121, 15):
        requests = len(sendgrid.requests())
        clock.set(minutes * 60)
        eventually(lambda: len(sendgrid.requests()) > requests, "a further attempt")  # noqa: B023
    sendgrid.behave()
    # An attempt that fails after the clock was set would wait for another hour.
    eventually(lambda: statuses(host).keys() <= {"waiting", "sent"}, "the end of all attempts")
    clock.set(4 * 3600 - 60)  # wakes every email that waits

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": COUNT}
    assert set(sendgrid.delivered().values()) == {1}
