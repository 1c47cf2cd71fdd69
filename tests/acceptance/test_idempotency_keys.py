"""With Resend's idempotency keys, `dispatcher run` neither holds nor duplicates emails whose outcome is unknown."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.double import Double, ResendDouble, SeveralRecipients
from tests.acceptance.harness import Host, emails, stop
from tests.supervisor.program import eventually


@pytest.fixture
def resend(tmp_path: Path) -> Iterator[ResendDouble]:
    """A Resend double for this test."""
    made = ResendDouble(tmp_path / "resend")
    yield made
    made.kill()


@pytest.fixture
def sendgrid(tmp_path: Path) -> Iterator[Double]:
    """A SendGrid double for this test."""
    made = Double(tmp_path / "sendgrid")
    yield made
    made.kill()


def test_200_emails_are_sent_once_although_the_provider_accepts_each_and_closes_without_an_answer(
    host: Host, resend: ResendDouble, sendgrid: Double
) -> None:
    host.recipient = SeveralRecipients(resend, sendgrid)
    resend.behave(act="close", times=200)
    ids = host.enqueue(emails(200))
    run = host.run()

    books = host.await_finished(ids)

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 200}
    assert set(resend.delivered().values()) == {1}
    assert not sendgrid.delivered()
    assert len(resend.requests()) == 400


def test_emails_on_the_wire_of_a_killed_worker_are_sent_once_and_not_held(host: Host, resend: ResendDouble) -> None:
    host.recipient = resend
    resend.behave(act="hang")
    run = host.run(WORKERS=1)
    host.await_consumers(1)
    ids = host.enqueue(emails(50))
    eventually(lambda: len(resend.delivered()) == 50, "50 emails on the wire")
    resend.behave()

    run.send_to(run.pid_of("worker 0"), signal.SIGKILL)

    books = host.await_finished(ids)
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 50}
    assert set(resend.delivered().values()) == {1}
    assert {row.attempt_count for row in host.rows().values()} == {2}
