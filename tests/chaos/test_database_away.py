"""If PostgreSQL stops before an acceptance is recorded, the worker keeps the answer and does not send again."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest

from tests.acceptance.harness import Double, Host, emails, stop
from tests.acceptance.outages import POSTGRES, StoppableServers
from tests.supervisor.program import eventually

EMAILS = 60
LEASE_SECONDS = 6
"""Shorter than any outage here. After the outage, the relay must not recover leases before the workers renew them,
which takes up to a third of this time."""


@pytest.mark.parametrize("seconds", [6.5, pytest.param(30.0, marks=pytest.mark.slow)])
def test_answers_that_arrive_during_a_postgresql_outage_are_recorded_after_it(
    host: Host, stoppable: StoppableServers, seconds: float
) -> None:
    # The double accepts an email before it delays the answer. So each accepted email stays unanswered and unrecorded
    # for half a second.
    double = Double(host.folder / "double", "--latency-ms", "500")
    host.recipient = double
    ids = host.enqueue(emails(EMAILS))
    run = host.run(LEASE_SECONDS=LEASE_SECONDS, PREFETCH=EMAILS)
    eventually(lambda: len(double.delivered()) == EMAILS, "the acceptance of all")

    stoppable.stop(POSTGRES, signal.SIGQUIT)
    away_since = time.monotonic()
    answered = run.await_events("email.attempted", EMAILS)
    eventually(lambda: time.monotonic() - away_since >= seconds, "the end of the outage", seconds=seconds + 5)
    stoppable.restart(POSTGRES)

    books = host.await_finished(ids)
    stop(run)
    double.kill()
    assert answered["outcome"] == "accepted"
    books.assert_balanced()
    assert books.counts == {"sent": EMAILS}
    assert Counter(request["email_id"] for request in double.requests()) == {str(email_id): 1 for email_id in ids}
    assert {row.attempt_count for row in host.rows().values()} == {1}
    assert not run.events("process.exited", level="error")
