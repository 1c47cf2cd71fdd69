"""Alerts by email to a real SMTP server: the channel verifies TLS, keeps total deadlines, and shows no server text in
errors."""

from __future__ import annotations

import asyncio
import email.policy
import ssl
from collections.abc import AsyncIterator
from email.message import EmailMessage
from pathlib import Path

import pytest
import trustme

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_sink import SmtpSink
from dispatcher.domain.alert import NotDelivered, Notice
from dispatcher.monitor.alert_mail import MailChannel
from tests.waiting import Overtime

TO = ("ops@example.com", "night@example.com")


@pytest.fixture
def tls(ca: trustme.CA) -> ssl.SSLContext:
    """The server's TLS context."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[SmtpSink]:
    """An SMTP server without TLS whose behaviour a test may change."""
    running = SmtpSink(tmp_path, SmtpBehaviour(), writes_eml=False, keeps=True)
    await running.start()
    yield running
    await running.close()


def channel_to(sink: SmtpSink, security: str = "none", ca_file: Path | None = None, **login: str) -> MailChannel:
    """A channel that sends alerts to this server."""
    server = SmtpServer("127.0.0.1", sink.port, security, **login)
    return MailChannel(server, "alerts@example.com", TO, ca_file=ca_file, total_seconds=20)


async def test_a_notice_arrives_as_one_plain_email(sink: SmtpSink, notice: Notice) -> None:
    words = await channel_to(sink).send(notice)

    (received,) = sink.received
    parsed = email.message_from_bytes(received.content, policy=email.policy.default)
    assert isinstance(parsed, EmailMessage)
    assert (received.sender, received.recipients) == ("alerts@example.com", TO)
    assert parsed["Subject"] == "[CRITICAL] RabbitMQ: 3 messages on the dead-letter queue email.dispatcher.dlq"
    assert parsed["Message-ID"] == "<alert_1@example.com>"
    assert parsed["Auto-Submitted"] == "auto-generated"
    lines = parsed.get_content().splitlines()
    assert lines[0].endswith("Manual intervention is required.")
    assert "severity: CRITICAL" in lines
    assert "count: 3" in lines
    assert "correlation ids: order-1, order-2" in lines
    assert words == "the SMTP server accepted the alert for 2 of 2 recipients"


async def test_starttls_is_required_and_its_certificate_verified(
    sink: SmtpSink, tls: ssl.SSLContext, ca_file: Path, notice: Notice
) -> None:
    with pytest.raises(NotDelivered):
        await channel_to(sink, "starttls", ca_file).send(notice)
    sink.behaviour.security, sink.behaviour.tls = "starttls", tls
    with pytest.raises(NotDelivered, match="certificate"):
        await channel_to(sink, "starttls").send(notice)
    assert sink.received == []

    await channel_to(sink, "starttls", ca_file).send(notice)

    assert len(sink.received) == 1


async def test_a_login_is_used_and_a_wrong_one_is_reported_without_the_password(sink: SmtpSink, notice: Notice) -> None:
    sink.behaviour.login = ("alerts", "right-password")

    with pytest.raises(NotDelivered, match="answered 535") as fault:
        await channel_to(sink, username="alerts", password="wrong-password").send(notice)
    await channel_to(sink, username="alerts", password="right-password").send(notice)

    assert "password" not in fault.value.reason
    assert len(sink.received) == 1


async def test_the_other_recipients_get_the_notice_if_one_is_refused(sink: SmtpSink, notice: Notice) -> None:
    server = SmtpServer("127.0.0.1", sink.port, "none")

    words = await MailChannel(server, "a@example.com", ("refused@example.com", "ops@example.com")).send(notice)

    assert words == "the SMTP server accepted the alert for 1 of 2 recipients"
    with pytest.raises(NotDelivered, match=r"refused every recipient \(550\)") as fault:
        await MailChannel(server, "a@example.com", ("refused@example.com",)).send(notice)
    assert "@" not in fault.value.reason


@pytest.mark.parametrize("step", [Step.CONNECT, Step.MAIL, Step.RCPT, Step.DATA, Step.END])
async def test_a_refusal_is_not_delivered_and_the_servers_text_is_left_out(
    sink: SmtpSink, notice: Notice, step: Step
) -> None:
    sink.behaviour.script = {step: "554 5.7.1 no, ops@example.com"}

    with pytest.raises(NotDelivered) as fault:
        await channel_to(sink).send(notice)

    assert "@" not in fault.value.reason


@pytest.mark.parametrize("act", [SmtpFault.HANG, SmtpFault.DRIP])
async def test_a_server_that_is_slow_takes_no_longer_than_the_whole_deadline(
    sink: SmtpSink, notice: Notice, act: SmtpFault
) -> None:
    sink.behaviour.script = {Step.MAIL: act}
    server = SmtpServer("127.0.0.1", sink.port, "none")
    overtime = Overtime(asyncio.get_running_loop().time() + 0.3)

    with pytest.raises(NotDelivered):
        await MailChannel(server, "a@example.com", TO, total_seconds=0.3).send(notice)

    assert overtime.end() < 1


async def test_a_refused_connection_is_reported(notice: Notice, closed_port: int) -> None:
    server = SmtpServer("127.0.0.1", closed_port, "none")

    with pytest.raises(NotDelivered, match="no connection to the SMTP server"):
        await MailChannel(server, "a@example.com", TO).send(notice)
