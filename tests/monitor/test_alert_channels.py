"""Alerts by webhook to a real https server, and by email to a real SMTP server. Both channels verify TLS, keep total
deadlines, and show no secret and no server text in errors. Every notice contains what an operator needs."""

from __future__ import annotations

import asyncio
import email.policy
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from email.message import EmailMessage
from ipaddress import ip_address
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import orjson
import pytest
import trustme

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.dev.smtp_sink import SmtpSink
from dispatcher.domain.alert import Kind, NotDelivered, Notice, Phase
from dispatcher.errors import ConfigurationError
from dispatcher.monitor.alert_channels import WebhookChannel
from dispatcher.monitor.alert_mail import MailChannel
from dispatcher.monitor.alert_words import payload, subject, text
from dispatcher.transport.destination import MAX_ADDRESSES, is_public
from dispatcher.transport.signed_post import MAX_HEAD_OCTETS, MAX_INFORMATIONAL
from tests.monitor.receiver import SECRET, Receiver
from tests.waiting import DEADLINE_SECONDS, Overtime, until


class Resolver:
    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def __call__(self, _host: str, _port: int) -> Sequence[str]:
        self.asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def channel_to(url: str, ca_file: Path, resolver: Resolver | None = None, **options: Any) -> WebhookChannel:
    resolving = {"resolver": resolver} if resolver else {}
    return WebhookChannel(url, SECRET, **{"allow_private": True, "ca_file": ca_file, **resolving, **options})


def named(receiver: Receiver, host: str = "alerts.example.com") -> str:
    return f"https://{host}:{receiver.server_port}/x"


async def test_a_notice_arrives_complete_and_signed(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    await channel_to(receiver.url, ca_file).send(notice)

    (posted,) = receiver.posted
    assert posted.is_signed
    assert posted.path == "/alerts?source=mail"
    assert posted.headers["webhook-id"] == "alert_1"
    assert posted.headers["content-type"] == "application/json"
    assert (posted.json["type"], posted.json["timestamp"]) == ("alert.raised", "2026-05-04T03:02:01.000Z")
    assert posted.data == {
        "severity": "CRITICAL",
        "component": "RabbitMQ",
        "phase": "raised",
        "kind": "dead_letters",
        "timestamp": "2026-05-04T03:02:01.000Z",
        "queue": "email.dispatcher.dlq",
        "count": 3,
        "oldest_age_seconds": 61.2,
        "correlation_ids": ["order-1", "order-2"],
        "reason": None,
        "raised_at": "2026-05-04T03:02:01.000Z",
        "host": "host-1",
        "summary": "3 messages on the dead-letter queue email.dispatcher.dlq. Manual intervention is required.",
    }


async def test_any_status_but_2xx_is_not_delivered_and_no_redirect_is_followed(
    receiver: Receiver, ca_file: Path, notice: Notice
) -> None:
    statuses = (301, 302, 307, 308, 400, 401, 404, 410, 429, 500, 503)
    receiver.statuses = list(statuses)

    for status in statuses:
        with pytest.raises(NotDelivered, match=f"the receiver answered {status}"):
            await channel_to(receiver.url, ca_file).send(notice)

    assert len(receiver.posted) == len(statuses)


@pytest.mark.parametrize(
    ("host", "addresses", "reason"),
    [
        ("127.0.0.1", None, "DISPATCHER_ALERT_WEBHOOK_ALLOW_PRIVATE"),
        ("alerts.example.com", ["93.184.215.14", "10.0.0.7"], "not public"),  # one private address is enough
    ],
)
async def test_private_addresses_are_refused_unless_allowed(
    receiver: Receiver, ca_file: Path, notice: Notice, host: str, addresses: list[str] | None, reason: str
) -> None:
    resolver = Resolver(addresses) if addresses else None

    with pytest.raises(NotDelivered, match=reason):
        await channel_to(named(receiver, host), ca_file, resolver, allow_private=False).send(notice)

    assert receiver.posted == []


async def test_the_connection_goes_to_the_checked_address(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    """The channel resolves the name only once, so a later answer has no effect. TLS still verifies the name."""
    resolver = Resolver(["127.0.0.1"], ["192.0.2.1"])
    channel = channel_to(named(receiver), ca_file, resolver)

    await channel.send(notice)

    assert resolver.asked == 1
    assert receiver.posted[0].headers["host"] == f"alerts.example.com:{receiver.server_port}"


async def test_the_next_address_is_tried_if_one_is_unreachable_but_only_a_few(
    receiver: Receiver, ca_file: Path, notice: Notice
) -> None:
    unreachable = [f"127.9.9.{number}" for number in range(1, MAX_ADDRESSES)]

    await channel_to(named(receiver), ca_file, Resolver([*unreachable, "127.0.0.1"])).send(notice)
    with pytest.raises(NotDelivered, match="refused"):
        await channel_to(named(receiver), ca_file, Resolver([*unreachable, "127.9.9.99", "127.0.0.1"])).send(notice)

    assert len(receiver.posted) == 1


DONE = b"HTTP/1.1 204 No Content\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\n" + b"link: x\r\n" * 600 + b"\r\n"


def head_of(octets: int) -> bytes:
    return DONE[:-2] + b"x: ".ljust(octets - len(DONE) - 2, b"x") + b"\r\n\r\n"


ANSWERS: dict[str, tuple[str | None, Iterable[bytes]]] = {
    "informational answers": (None, [CONTINUE * MAX_INFORMATIONAL + DONE]),
    "early hints": (None, [HINTS, DONE]),
    "the longest head": (None, [head_of(MAX_HEAD_OCTETS)]),
    "a body without end": (None, chain([DONE], repeat(b"x" * 4096))),
    "two body lengths": (None, [DONE[:-2] + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"]),
    "one too many": ("informational", [CONTINUE * (MAX_INFORMATIONAL + 1) + DONE]),
    "informational answers without end": ("informational", repeat(CONTINUE * 100)),
    "a head that is too long": ("longer than 16 KiB", [head_of(MAX_HEAD_OCTETS + 1)]),
    "headers without end": ("longer than 16 KiB", chain([DONE[:-2]], repeat(b"x: y\r\n" * 1000))),
}


@pytest.fixture
def tls(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    return context


@asynccontextmanager
async def answering(parts: Iterable[bytes], tls: ssl.SSLContext) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the client may close the connection at any time
            await reader.readuntil(b"\r\n\r\n")
            for octets in parts:
                writer.write(octets)
                await writer.drain()
            await reader.read()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


@pytest.mark.parametrize(("reason", "parts"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_within_the_limits_counts_and_one_beyond_them_ends_the_post(
    tls: ssl.SSLContext, ca_file: Path, notice: Notice, reason: str | None, parts: Iterable[bytes]
) -> None:
    async with answering(parts, tls) as url:
        if reason is None:
            assert await channel_to(url, ca_file).send(notice) == "the receiver answered 204"
        else:
            with pytest.raises(NotDelivered, match=reason):
                await channel_to(url, ca_file).send(notice)


@pytest.mark.parametrize(("host", "trusts"), [("other.example.com", True), ("alerts.example.com", False)])
async def test_a_certificate_for_another_name_or_of_an_untrusted_authority_is_refused(
    receiver: Receiver, ca_file: Path, notice: Notice, host: str, trusts: bool
) -> None:
    if not trusts:
        trustme.CA().cert_pem.write_to_path(ca_file)

    with pytest.raises(NotDelivered, match="certificate"):
        await channel_to(named(receiver, host), ca_file, Resolver(["127.0.0.1"])).send(notice)

    assert receiver.posted == []


async def test_a_silent_receiver_fails_at_the_total_deadline(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    receiver.released.clear()
    seconds = 0.1
    while not receiver.posted and seconds < DEADLINE_SECONDS:  # until the request was received in time
        seconds *= 2
        overtime = Overtime(asyncio.get_running_loop().time() + seconds)
        with pytest.raises(NotDelivered, match="no answer"):
            await channel_to(receiver.url, ca_file, total_seconds=seconds).send(notice)
        assert overtime.end() < 1

    await until(lambda: receiver.posted)


async def test_a_refused_connection_is_named_without_the_url(ca_file: Path, notice: Notice, closed_port: int) -> None:
    channel = channel_to(f"https://127.0.0.1:{closed_port}/token-in-path", ca_file)

    with pytest.raises(NotDelivered) as fault:
        await channel.send(notice)

    assert "refused" in fault.value.reason.lower()
    assert "token-in-path" not in fault.value.reason


async def test_a_name_without_an_address_is_reported(ca_file: Path, notice: Notice) -> None:
    with pytest.raises(NotDelivered, match="cannot be resolved"):
        await channel_to("https://alerts.invalid/", ca_file, total_seconds=20).send(notice)


TO = ("ops@example.com", "night@example.com")


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[SmtpSink]:
    running = SmtpSink(tmp_path, SmtpBehaviour(), writes_eml=False, keeps=True)
    await running.start()
    yield running
    await running.close()


def mail_to(
    port: int,
    security: str = "none",
    ca_file: Path | None = None,
    *,
    to: Sequence[str] = TO,
    seconds: float = 20,
    **login: str,
) -> MailChannel:
    server = SmtpServer("127.0.0.1", port, security, **login)
    return MailChannel(server, "alerts@example.com", tuple(to), ca_file=ca_file, total_seconds=seconds)


async def test_a_notice_arrives_as_one_plain_email(sink: SmtpSink, notice: Notice) -> None:
    words = await mail_to(sink.port).send(notice)

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
        await mail_to(sink.port, "starttls", ca_file).send(notice)
    sink.behaviour.security, sink.behaviour.tls = "starttls", tls
    with pytest.raises(NotDelivered, match="certificate"):
        await mail_to(sink.port, "starttls").send(notice)
    assert sink.received == []

    await mail_to(sink.port, "starttls", ca_file).send(notice)

    assert len(sink.received) == 1


async def test_a_login_is_used_and_a_wrong_one_is_reported_without_the_password(sink: SmtpSink, notice: Notice) -> None:
    sink.behaviour.login = ("alerts", "right-password")

    with pytest.raises(NotDelivered, match="answered 535") as fault:
        await mail_to(sink.port, username="alerts", password="wrong-password").send(notice)
    await mail_to(sink.port, username="alerts", password="right-password").send(notice)

    assert "password" not in fault.value.reason
    assert len(sink.received) == 1


async def test_the_other_recipients_get_the_notice_if_one_is_refused(sink: SmtpSink, notice: Notice) -> None:
    words = await mail_to(sink.port, to=["refused@example.com", "ops@example.com"]).send(notice)

    assert words == "the SMTP server accepted the alert for 1 of 2 recipients"
    with pytest.raises(NotDelivered, match=r"refused every recipient \(550\)") as fault:
        await mail_to(sink.port, to=["refused@example.com"]).send(notice)
    assert "@" not in fault.value.reason


async def test_a_refusal_is_not_delivered_and_the_servers_text_is_left_out(sink: SmtpSink, notice: Notice) -> None:
    for step in (Step.CONNECT, Step.MAIL, Step.RCPT, Step.DATA, Step.END):
        sink.behaviour.script = {step: "554 5.7.1 no, ops@example.com"}

        with pytest.raises(NotDelivered) as fault:
            await mail_to(sink.port).send(notice)

        assert "@" not in fault.value.reason, step


@pytest.mark.parametrize("act", [SmtpFault.HANG, SmtpFault.DRIP])
async def test_a_server_that_is_slow_takes_no_longer_than_the_whole_deadline(
    sink: SmtpSink, notice: Notice, act: SmtpFault
) -> None:
    sink.behaviour.script = {Step.MAIL: act}
    overtime = Overtime(asyncio.get_running_loop().time() + 0.3)

    with pytest.raises(NotDelivered):
        await mail_to(sink.port, seconds=0.3).send(notice)

    assert overtime.end() < 1


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("phase", Phase)
def test_every_notice_has_the_facts_and_requests_intervention_while_the_alert_is_active(
    notice: Notice, kind: Kind, phase: Phase
) -> None:
    notice = replace(notice, phase=phase, alert=replace(notice.alert, kind=kind))

    document = orjson.loads(payload(notice))

    assert (document["type"], document["data"]["severity"]) == (f"alert.{phase}", "CRITICAL")
    for words in (text(notice), payload(notice).decode()):
        for fact in ("CRITICAL", notice.alert.component, "email.dispatcher.dlq", "2026-05-04T03:02:01.000Z", kind):
            assert fact in words
    is_called = "Manual intervention is required." in text(notice)
    assert is_called == (phase in (Phase.RAISED, Phase.REMINDED))
    assert subject(notice).startswith("[CRITICAL") == is_called


NOT_PUBLIC = (
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",  # noqa: S104
    "255.255.255.255", "224.0.0.1", "198.18.0.1", "192.0.2.1", "240.0.0.1",
    "::", "::1", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
    "192.0.0.1", "192.0.0.9", "192.0.0.10", "192.0.0.170", "64:ff9b::1.1.1.1", "64:ff9b:1::1.1.1.1",
    "::1.1.1.1", "::ffff:0:10.0.0.1", "::ffff:192.0.0.9", "fec0::1", "feff::1",
    "192.88.99.1", "3fff::1", "3fff:fff:ffff::1", "5f00::1", "2002:c058:6301::1",
    "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
)  # fmt: skip
PUBLIC = ("93.184.215.14", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "192.0.1.1", "192.88.98.1", "2a00::1")


@pytest.mark.parametrize("text", NOT_PUBLIC + PUBLIC)
def test_private_and_special_addresses_are_not_public(text: str) -> None:
    assert is_public(ip_address(text)) is (text in PUBLIC)


def test_an_empty_ca_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")

    with pytest.raises(ConfigurationError, match="DISPATCHER_CA_FILE"):
        WebhookChannel("https://a.example/", SECRET, ca_file=tmp_path / "ca.pem")
