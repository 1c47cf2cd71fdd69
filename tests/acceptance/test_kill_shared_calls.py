"""SIGKILL while bulk calls are on the wire: all emails of these calls are held, and no other emails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from dispatcher import Email
from tests.acceptance.double import Double
from tests.acceptance.harness import Host, stop
from tests.supervisor.program import eventually

COUNT = 300
CALL_EMAILS = 25


@pytest.fixture
def double(tmp_path: Path, host: Host) -> Iterator[Double]:
    """A SendGrid double for this test, which receives the host's emails."""
    made = Double(tmp_path / "double", "--latency-ms", "4000")
    host.recipient = made
    yield made
    made.kill()


def templated(count: int) -> Iterator[Email]:
    for number in range(count):
        yield Email(
            message_key=f"templated-{number}",
            sender="Shop <shop@example.com>",
            to=f"customer-{number}@example.org",
            subject="",
            template_id="d-1",
            template_data={"order": number},
        )


def calls_of(requests: list[dict[str, Any]]) -> Iterator[set[UUID]]:
    """The emails of each bulk call. The double lists the emails of a call one after another."""
    lines = iter(requests)
    for first in lines:
        others = islice(lines, first["together"] - 1)
        yield {UUID(line["email_id"]) for line in (first, *others)}


def test_a_killed_worker_holds_whole_calls_and_nothing_else(host: Host, double: Double) -> None:
    ids = host.enqueue(templated(COUNT))
    run = host.run(BULK_CALL_EMAILS=CALL_EMAILS, PREFETCH=100)
    victim = run.pid_of("worker 0")
    # The double accepts immediately and answers seconds later. So the kill comes before the answer, even on a slow
    # machine.
    eventually(lambda: host.leased_by(victim) & double.delivered().keys(), "calls on the wire")

    os.kill(victim, signal.SIGKILL)

    run.await_events("ledger.settled")
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    held = {email_id for email_id, row in host.rows().items() if row.status == "held"}
    assert len(held) == sum(event["uncertain"] for event in run.events("ledger.settled")) > 1
    assert books.count("sent") == COUNT - len(held)
    calls = list(calls_of(double.requests()))
    assert max(map(len, calls)) == CALL_EMAILS
    # If the worker got no answer to a call, all emails of the call are held, whether or not the double had read the
    # call.
    torn = [call for call in calls if 0 < len(call & held) < len(call)]
    # At most one call may be held in part: the worker may have been killed while it recorded the answer to this call.
    assert len(torn) <= 1
    assert not books.duplicates
