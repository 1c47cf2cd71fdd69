"""Providers throttle, fail or stop answering `dispatcher run`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.acceptance.double import Double, SeveralRecipients
from tests.acceptance.harness import WORKERS, Host, emails, stop
from tests.supervisor.program import Program, eventually

ON_THE_WIRE = 256
"""A worker's in-flight requests when its first 429 arrives. This is also the most 429s that the worker gets."""


@pytest.fixture
def double(tmp_path: Path, host: Host) -> Iterator[Double]:
    """A SendGrid double for this test, which receives the host's emails."""
    made = Double(tmp_path / "double")
    host.recipient = made
    yield made
    made.kill()


@pytest.mark.parametrize(
    ("seconds", "count"), [(5, 3000), pytest.param(10, 8000, marks=pytest.mark.slow)], ids=["5 s", "10 s"]
)
def test_after_a_series_of_429_every_email_is_sent_once(host: Host, double: Double, seconds: int, count: int) -> None:
    run = host.run()
    host.await_consumers()
    double.behave(latency_ms=1000)  # slow, so that emails are left when the 429s begin
    ids = host.enqueue(emails(count))
    host.await_delivered(count // 10)
    throttled_until = time.time() + seconds  # the earliest end of the throttling
    double.behave(throttle_seconds=seconds)

    books = host.await_finished(ids, seconds=30 + 3 * seconds)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": count}
    assert {row.attempt_count for row in host.rows().values()} == {1}
    throttled = [request["at"] for request in double.requests("429")]
    assert throttled, "no email got a 429"
    # Each worker gets 429s only for its in-flight requests. Then no worker calls the provider until the requested time.
    assert len(throttled) <= WORKERS * ON_THE_WIRE
    assert max(throttled) < max(throttled_at(run).values()) + seconds - 1.5
    after = [request["at"] for request in double.requests("accepted") if request["at"] > min(throttled)]
    assert min(after) >= throttled_until


def test_no_email_times_out_at_a_slow_server(host: Host) -> None:
    host.sink("--latency-ms", "1000")
    ids = host.enqueue(emails(64))
    run = host.run(WORKERS=1, SMTP_CONNECTIONS=8, SEND_TIMEOUT_SECONDS=5)  # the last email waits longer than this

    books = host.await_finished(ids, seconds=60)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 64}
    assert {row.attempt_count for row in host.rows().values()} == {1}
    assert not run.events("provider.paused")


def throttled_at(run: Program) -> dict[str, float]:
    """The time of each worker's first 429, in unix seconds."""
    paused = run.events("provider.paused", state="paused")
    return {event["worker"]: datetime.fromisoformat(event["timestamp"]).timestamp() for event in reversed(paused)}


def test_a_provider_outage_loses_no_email(host: Host, double: Double) -> None:
    run = host.run()
    host.await_finished(host.enqueue(emails(1, name="first")))
    double.kill()

    ids = host.enqueue(emails(500))
    run.await_events("provider.paused", WORKERS, state="open")
    eventually(lambda: not [row for row in host.rows().values() if row.locked_by], "the release of all leases")
    assert not host.rabbit.read_all(host.topology.dlq)
    double.start()

    books = host.await_finished(ids)
    stop(run)
    assert books.counts == {"sent": 500}
    assert not books.duplicates
    assert not host.rabbit.read_all(host.topology.dlq)


def test_emails_that_the_first_provider_refuses_are_sent_once_by_the_second(host: Host, double: Double) -> None:
    sink = host.sink()
    host.recipient = SeveralRecipients(double, sink)
    double.kill()
    ids = host.enqueue(emails(500))

    run = host.run()

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 500}
    assert sink.delivered() == dict.fromkeys(ids, 1)
    assert not double.delivered()


@pytest.mark.slow
def test_emails_with_templates_wait_for_their_provider_and_others_use_the_second(host: Host, double: Double) -> None:
    sink = host.sink()
    host.recipient = SeveralRecipients(double, sink)
    double.kill()
    templated = set(host.enqueue(emails(20, name="templated", template_id="d-1")))
    run = host.run(WORKERS=2)
    run.await_events("provider.paused", provider="sendgrid")

    texts = set(host.enqueue(emails(500, name="text")))

    eventually(lambda: sink.delivered() == dict.fromkeys(texts, 1), "the delivery of emails with text by SMTP")
    assert {row.status for email_id, row in host.rows().items() if email_id in templated} <= {"pending", "sending"}
    double.start()
    books = host.await_finished(templated | texts)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 520}
    assert double.delivered() == dict.fromkeys(templated, 1)


def test_a_missing_answer_causes_no_second_request_at_any_provider(host: Host, double: Double) -> None:
    # The server accepts the email, and closes the connection without an answer.
    sink = host.sink()
    host.recipient = SeveralRecipients(double, sink)
    double.behave(act="close")
    run = host.run()
    run.await_events("broker.connected", WORKERS)

    ids = host.enqueue(emails(200))

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"held": 200}
    assert len(double.requests()) == 200
    assert double.delivered() == dict.fromkeys(ids, 1)
    assert not sink.delivered()


def test_with_a_wrong_key_no_email_is_lost_and_the_next_provider_sends(host: Host, double: Double) -> None:
    sink = host.sink()
    host.recipient = SeveralRecipients(double, sink)
    double.behave(reply={"status": 401, "body": {"errors": [{"message": "bad key"}]}})

    run = host.run()

    ids = host.enqueue(emails(100))
    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 100}
    assert {row.attempt_count for row in host.rows().values()} == {1}
    assert sink.delivered() == dict.fromkeys(ids, 1)


@pytest.mark.slow
def test_a_rate_limit_holds_across_workers_and_hosts(host: Host, double: Double, tmp_path: Path) -> None:
    ceiling, seconds = 200, 20
    runs = [
        host.run(WORKERS=3, RUN_DIR=tmp_path / f"host-{number}", SENDGRID_MAX_PER_SECOND=ceiling) for number in range(2)
    ]
    for run in runs:
        run.await_events("broker.connected", 3)

    ids = host.enqueue(emails(ceiling * (seconds + 5)))

    books = host.await_finished(ids, seconds=2 * seconds)
    for run in runs:
        stop(run)
    assert books.counts == {"sent": len(ids)}
    accepted = sorted(request["at"] for request in double.requests("accepted"))
    begin = accepted[0] + 1
    within = sum(begin <= at < begin + seconds for at in accepted)
    print(f"{within / seconds:.1f} emails per second over {seconds} s")
    assert within / seconds == pytest.approx(ceiling, rel=0.05)
