"""Operators get alerts in time about dead letters and about a failed probe. The alerts do not go through our own
queues."""

from __future__ import annotations

import asyncio
import email.policy
import time
from collections.abc import Iterator, Mapping
from email.message import EmailMessage
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from dispatcher.broker.management import CountsUnavailable, Management
from tests.acceptance.closable_proxy import ClosableProxy
from tests.acceptance.harness import Host, Sink, emails, stop
from tests.monitor.receiver import SECRET, Posted, Receiver, receiving, write_ca
from tests.supervisor.program import Program, eventually

PROBE_SECONDS = 0.5
SOON_SECONDS = 30.0
"""The management API's counts lag by 5 seconds, so an idle machine needs 6 seconds. A busy machine needs more."""
POISON = b'{"to": "ann@example.org", "subject": "Your code", "text": "code-QZ4711"'


@pytest.fixture
def ca() -> trustme.CA:
    """The authority that signed the certificate of the webhook receiver."""
    return trustme.CA()


@pytest.fixture
def receiver(ca: trustme.CA) -> Iterator[Receiver]:
    with receiving(ca, "127.0.0.1") as running:
        yield running


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Sink]:
    """The operators' own SMTP server."""
    opened = Sink(tmp_path / "operators", keeps_eml=True)
    yield opened
    opened.kill()


@pytest.fixture
def settings(receiver: Receiver, mailbox: Sink, ca: trustme.CA, tmp_path: Path) -> dict[str, str]:
    """Settings for both alert channels."""
    return {
        "DLQ_PROBE_SECONDS": str(PROBE_SECONDS),
        "ALERT_WEBHOOK_URL": receiver.url,
        "ALERT_WEBHOOK_SECRET": SECRET,
        "ALERT_WEBHOOK_ALLOW_PRIVATE": "on",
        "ALERT_SMTP_URL": mailbox.settings["SMTP_URL"],
        "ALERT_EMAIL_FROM": "dispatcher@example.com",
        "ALERT_EMAIL_TO": "night@example.com, day@example.com",
        "CA_FILE": str(write_ca(ca, tmp_path)),
    }


def start(host: Host, settings: Mapping[str, str]) -> Program:
    """Start `dispatcher run` with these settings."""
    return host.run(stdout=None, **settings)


def await_posted(receiver: Receiver, kind: str, what: str = "alert.raised") -> Posted:
    """Wait for a webhook of this kind."""

    def found() -> Posted | None:
        posted = [one for one in receiver.posted if (one.data["kind"], one.json["type"]) == (kind, what)]
        return posted[0] if posted else None

    return eventually(found, f"{what} of {kind}", seconds=SOON_SECONDS)


def await_mails(mailbox: Sink, subject: str) -> list[EmailMessage]:
    """Wait for emails to operators whose subject starts like this."""

    def found() -> list[EmailMessage]:
        parsed = [
            email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
            for path in mailbox.mail_folder.glob("*.eml")
        ]
        # A file that is still being written has no subject yet.
        return [one for one in parsed if (one["Subject"] or "").startswith(subject)]

    return eventually(found, f"an email '{subject}'", seconds=SOON_SECONDS)


def await_reported_depth(host: Host, depth: int) -> None:
    """Wait until RabbitMQ's management API reports this many dead letters."""
    management = Management(host.servers.management_url, timeout_seconds=SOON_SECONDS)

    def reported() -> bool:
        try:
            return asyncio.run(management.depth(host.topology.dlq)).messages == depth
        except CountsUnavailable:
            return False

    eventually(reported, f"{depth} dead letters", seconds=SOON_SECONDS)


def test_a_malformed_message_alerts_by_webhook_and_email_within_seconds_without_its_content(
    host: Host, settings: dict[str, str], receiver: Receiver, mailbox: Sink
) -> None:
    host.sink()
    await_reported_depth(host, 0)
    run = start(host, settings)
    run.await_events("relay.leading")
    host.rabbit.publish(host.topology.queue, POISON)
    began_at = time.monotonic()

    posted = await_posted(receiver, "dead_letters")
    (mail,) = await_mails(mailbox, "[CRITICAL] RabbitMQ: 1 message on the dead-letter queue")
    await_reported_depth(host, 1)

    assert posted.arrived_at - began_at < SOON_SECONDS
    assert posted.is_signed
    facts = {"severity": "CRITICAL", "component": "RabbitMQ", "queue": host.topology.dlq, "count": 1}
    assert facts.items() <= posted.data.items()
    assert posted.data["oldest_age_seconds"] >= 0
    assert "Manual intervention is required." in posted.data["summary"]
    assert "Manual intervention is required." in mail.get_content()
    (dead_letter,) = host.rabbit.read_all(host.topology.dlq)
    assert (dead_letter.body, dead_letter.was_rejected) == (POISON, True)
    output = posted.body.decode() + str(mail) + run.log
    for private in ("ann@", "QZ4711", "Your code"):
        assert private not in output

    host.rabbit.purge(host.topology.dlq)
    await_posted(receiver, "dead_letters", "alert.resolved")
    await_mails(mailbox, "[RESOLVED]")
    stop(run)
    # There is only one alert, although the monitor checked several times.
    notice_types = [one.json["type"] for one in receiver.posted if one.data["kind"] == "dead_letters"]
    assert notice_types == ["alert.raised", "alert.resolved"]


@pytest.mark.slow
def test_a_failed_email_is_named_by_its_correlation_id(
    host: Host, settings: dict[str, str], receiver: Receiver
) -> None:
    host.sink()
    await_reported_depth(host, 0)
    run = start(host, settings)
    ids = host.enqueue(emails(1, to=lambda _: "refused@example.org"))
    host.await_finished(ids)

    posted = await_posted(receiver, "dead_letters")

    assert posted.data["correlation_ids"] == ["order-0"]
    assert 0 <= posted.data["oldest_age_seconds"] < 60
    assert "refused@example.org" not in posted.body.decode()
    stop(run)


def test_an_unreachable_management_api_alerts_within_one_interval_and_sending_continues(
    host: Host, settings: dict[str, str], receiver: Receiver, mailbox: Sink
) -> None:
    host.sink()
    await_reported_depth(host, 0)
    with ClosableProxy(host.servers.management_url) as proxy:
        run = start(host, {**settings, "RABBITMQ_MANAGEMENT_URL": proxy.url})
        run.await_events("relay.leading")
        proxy.shut()
        shut_at = time.monotonic()

        posted = await_posted(receiver, "probe_failed")
        ids = host.enqueue(emails(100))
        books = host.await_finished(ids)
        # Wait for both channels before the condition ends. A channel sends nothing about a condition that has already
        # ended.
        assert await_mails(mailbox, "[CRITICAL] RabbitMQ: the dead-letter queue")
        proxy.open()
        await_posted(receiver, "probe_failed", "alert.resolved")
        stop(run)

    # The alert comes within one probe interval, plus ten seconds for a busy machine.
    assert posted.arrived_at - shut_at < PROBE_SECONDS + 10
    assert posted.data["severity"] == "CRITICAL"
    assert posted.data["count"] is None
    assert "cannot be reached" in posted.data["reason"]
    assert str(urlsplit(host.servers.management_url).password) not in posted.body.decode() + run.log
    books.assert_balanced()
    assert books.counts == {"sent": 100}
    assert not run.events("process.exited", level="error")


@pytest.mark.slow
def test_unreachable_channels_do_no_harm_and_get_the_notice_when_they_are_back(
    host: Host, settings: dict[str, str], receiver: Receiver, mailbox: Sink
) -> None:
    host.sink()
    await_reported_depth(host, 0)
    mailbox.kill()
    receiver.statuses = [500, 302]
    run = start(host, settings)
    host.rabbit.publish(host.topology.queue, POISON)

    eventually(lambda: len(receiver.posted) == 3, "the webhook's third try", seconds=SOON_SECONDS)
    run.await_events("alert.delivery_failed", channel="email")
    ids = host.enqueue(emails(50))
    books = host.await_finished(ids)
    mailbox.start()
    await_mails(mailbox, "[CRITICAL]")
    stop(run)

    assert len({one.headers["webhook-id"] for one in receiver.posted}) == 1
    assert books.counts["sent"] == 50
    assert not run.events("process.exited", level="error")
