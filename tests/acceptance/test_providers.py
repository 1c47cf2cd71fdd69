"""What a host does while its providers throttle, fail or fall silent: `dispatcher run`, and doubles that misbehave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.acceptance.double import Double, InOrder
from tests.acceptance.harness import WORKERS, Host, emails, stop
from tests.supervisor.program import Program, eventually

ON_THE_WIRE = 256
"""Requests that a worker may have on their way when it hears the first 429; with as many ends each worker's storm."""


@pytest.fixture
def double(tmp_path: Path, host: Host) -> Iterator[Double]:
    """A SendGrid of the test's own, to which the host's emails go."""
    made = Double(tmp_path / "double")
    host.recipient = made
    yield made
    made.kill()


@pytest.mark.parametrize(
    ("seconds", "count"), [(5, 3000), pytest.param(10, 8000, marks=pytest.mark.slow)], ids=["5 s", "10 s"]
)
def test_a_storm_of_429_is_waited_out_and_then_everything_is_sent_once(
    host: Host, double: Double, seconds: int, count: int
) -> None:
    run = host.run()
    host.await_consumers()
    double.behave(latency_ms=1000)  # so that there is much to send still, however late the storm begins
    ids = host.enqueue(emails(count))
    host.await_delivered(count // 10)
    throttled_until = time.time() + seconds  # at the earliest
    double.behave(throttle_seconds=seconds)

    books = host.await_finished(ids, seconds=30 + 3 * seconds)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": count}
    assert {row.attempt_count for row in host.rows().values()} == {1}
    throttled = [request["at"] for request in double.requests("429")]
    assert throttled, "the storm was over before anybody felt it"
    # Each worker hears it once, with what it has on the wire; then nobody calls until the time that was asked for.
    assert len(throttled) <= WORKERS * ON_THE_WIRE
    assert max(throttled) < max(heard_at(run).values()) + seconds - 1.5
    after = [request["at"] for request in double.requests("accepted") if request["at"] > min(throttled)]
    assert min(after) >= throttled_until


def test_a_server_that_is_slow_with_each_of_many_emails_has_none_cut_off(host: Host) -> None:
    host.sink("--latency-ms", "1000")
    ids = host.enqueue(emails(64))
    run = host.run(WORKERS=1, SMTP_CONNECTIONS=8, SEND_TIMEOUT_SECONDS=5)  # the last one waits for longer than that

    books = host.await_finished(ids, seconds=60)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 64}
    assert {row.attempt_count for row in host.rows().values()} == {1}
    assert not run.events("provider.paused")


def heard_at(run: Program) -> dict[str, float]:
    """When each worker heard first that it has to slow down, in unix seconds."""
    paused = run.events("provider.paused", state="paused")
    return {event["worker"]: datetime.fromisoformat(event["timestamp"]).timestamp() for event in reversed(paused)}


def test_a_provider_that_is_down_for_a_while_costs_no_email(host: Host, double: Double) -> None:
    run = host.run()
    host.await_finished(host.enqueue(emails(1, name="first")))
    double.kill()

    ids = host.enqueue(emails(500))
    run.await_events("provider.paused", WORKERS, state="open")
    eventually(lambda: not [row for row in host.rows().values() if row.locked_by], "everything given back")
    assert not host.rabbit.read_all(host.topology.dlq)
    double.start()

    books = host.await_finished(ids)
    stop(run)
    assert books.counts == {"sent": 500}
    assert not books.duplicates
    assert not host.rabbit.read_all(host.topology.dlq)


def test_what_the_first_cannot_take_the_second_sends_each_once(host: Host, double: Double) -> None:
    sink = host.sink()
    host.recipient = InOrder(double, sink)
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
def test_templated_emails_wait_until_the_provider_with_templates_is_back_and_others_go_by_the_second(
    host: Host, double: Double
) -> None:
    sink = host.sink()
    host.recipient = InOrder(double, sink)
    double.kill()
    templated = set(host.enqueue(emails(20, name="templated", template_id="d-1")))
    run = host.run(WORKERS=2)
    run.await_events("provider.paused", provider="sendgrid")

    texts = set(host.enqueue(emails(500, name="text")))

    eventually(lambda: sink.delivered() == dict.fromkeys(texts, 1), "emails with text, by the second")
    assert {row.status for email_id, row in host.rows().items() if email_id in templated} <= {"pending", "sending"}
    double.start()
    books = host.await_finished(templated | texts)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 520}
    assert double.delivered() == dict.fromkeys(templated, 1)


def test_answers_that_never_come_make_no_second_request_and_no_second_provider(host: Host, double: Double) -> None:
    # It accepts, and closes the connection instead of saying so.
    sink = host.sink()
    host.recipient = InOrder(double, sink)
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


def test_a_wrong_key_costs_no_email_and_the_next_provider_sends(host: Host, double: Double) -> None:
    sink = host.sink()
    host.recipient = InOrder(double, sink)
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
def test_a_ceiling_holds_over_workers_and_hosts(host: Host, double: Double, tmp_path: Path) -> None:
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
