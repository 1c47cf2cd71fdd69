"""Alerts by webhook to a real https server: the channel signs requests, follows no redirects, and connects only to
checked addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path

import pytest
import trustme

from dispatcher.domain.alert import NotDelivered, Notice
from dispatcher.errors import ConfigurationError
from dispatcher.monitor.alert_channels import WebhookChannel
from dispatcher.transport.destination import MAX_ADDRESSES
from dispatcher.transport.signed_post import MAX_HEAD_OCTETS, MAX_INFORMATIONAL
from tests.monitor.receiver import SECRET, Receiver, receiving_raw
from tests.waiting import DEADLINE_SECONDS, Overtime, until


class Resolver:
    """A resolver that returns the given answers one after another, and then repeats the last answer."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def __call__(self, _host: str, _port: int) -> Sequence[str]:
        self.asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def channel_to(url: str, ca_file: Path, resolver: Resolver | None = None, *, seconds: float = 10) -> WebhookChannel:
    """A channel to this URL that may also connect to loopback addresses."""
    if resolver is None:
        return WebhookChannel(url, SECRET, allow_private=True, ca_file=ca_file, total_seconds=seconds)
    return WebhookChannel(url, SECRET, allow_private=True, ca_file=ca_file, resolver=resolver, total_seconds=seconds)


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


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 401, 404, 410, 429, 500, 503])
async def test_any_status_but_2xx_is_not_delivered_and_no_redirect_is_followed(
    receiver: Receiver, ca_file: Path, notice: Notice, status: int
) -> None:
    receiver.statuses = [status]

    with pytest.raises(NotDelivered, match=f"the receiver answered {status}"):
        await channel_to(receiver.url, ca_file).send(notice)

    assert len(receiver.posted) == 1


async def test_private_addresses_are_refused_unless_allowed(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    with pytest.raises(NotDelivered, match="DISPATCHER_ALERT_WEBHOOK_ALLOW_PRIVATE"):
        await WebhookChannel(receiver.url, SECRET, ca_file=ca_file).send(notice)

    assert receiver.posted == []


async def test_one_private_address_among_public_ones_is_enough_to_refuse(ca_file: Path, notice: Notice) -> None:
    resolver = Resolver(["93.184.215.14", "10.0.0.7"])
    channel = WebhookChannel("https://alerts.example.com/", SECRET, ca_file=ca_file, resolver=resolver)

    with pytest.raises(NotDelivered, match="not public"):
        await channel.send(notice)


async def test_the_connection_goes_to_the_checked_address(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    """The channel resolves the name only once, so a later answer has no effect. TLS still verifies the name."""
    resolver = Resolver(["127.0.0.1"], ["192.0.2.1"])
    channel = channel_to(f"https://alerts.example.com:{receiver.server_port}/x", ca_file, resolver)

    await channel.send(notice)

    assert resolver.asked == 1
    assert receiver.posted[0].headers["host"] == f"alerts.example.com:{receiver.server_port}"


async def test_the_next_address_is_tried_if_one_is_unreachable(
    receiver: Receiver, ca_file: Path, notice: Notice
) -> None:
    resolver = Resolver(["127.9.9.9", "127.0.0.1"])

    await channel_to(f"https://alerts.example.com:{receiver.server_port}/x", ca_file, resolver).send(notice)

    assert len(receiver.posted) == 1


async def test_the_next_address_is_tried_if_a_server_refuses_the_handshake(
    receiver: Receiver, ca_file: Path, notice: Notice
) -> None:
    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refused.append(writer)
        writer.write(b"this is not TLS")
        writer.close()

    refused: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(refuse, "127.0.0.2", receiver.server_port):
        channel = channel_to(
            f"https://alerts.example.com:{receiver.server_port}/x", ca_file, Resolver(["127.0.0.2", "127.0.0.1"])
        )
        await channel.send(notice)

    assert (len(refused), len(receiver.posted)) == (1, 1)


async def test_only_a_few_addresses_of_a_host_are_tried(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    url = f"https://alerts.example.com:{receiver.server_port}/x"
    unreachable = [f"127.9.9.{number}" for number in range(1, MAX_ADDRESSES)]

    await channel_to(url, ca_file, Resolver([*unreachable, "127.0.0.1"])).send(notice)
    with pytest.raises(NotDelivered, match="refused"):
        await channel_to(url, ca_file, Resolver([*unreachable, "127.9.9.99", "127.0.0.1"])).send(notice)

    assert len(receiver.posted) == 1


async def test_each_notice_resolves_the_name_again(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    resolver = Resolver(["127.9.9.9"], ["127.0.0.1"])
    channel = channel_to(f"https://alerts.example.com:{receiver.server_port}/x", ca_file, resolver)

    with pytest.raises(NotDelivered):
        await channel.send(notice)
    await channel.send(notice)

    assert len(receiver.posted) == 1


DONE = b"HTTP/1.1 204 No Content\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\n" + b"link: x\r\n" * 600 + b"\r\n"


def head_of(octets: int) -> bytes:
    """The head of a response that has this length."""
    return DONE[:-2] + b"x: ".ljust(octets - len(DONE) - 2, b"x") + b"\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([CONTINUE * MAX_INFORMATIONAL + DONE], id="informational answers"),
        pytest.param([HINTS, DONE], id="early hints"),
        pytest.param([DONE[at : at + 1] for at in range(len(DONE))], id="octet by octet"),
        pytest.param([head_of(MAX_HEAD_OCTETS)], id="the longest head"),
        pytest.param(chain([DONE], repeat(b"x" * 4096)), id="a body without end"),
        pytest.param([DONE[:-2] + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"], id="two body lengths"),
    ],
)
async def test_an_answer_within_the_limits_counts(
    ca: trustme.CA, ca_file: Path, notice: Notice, answer: Iterable[bytes]
) -> None:
    with receiving_raw(ca, lambda: answer) as receiver:
        assert await channel_to(receiver.url, ca_file).send(notice) == "the receiver answered 204"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param([CONTINUE * (MAX_INFORMATIONAL + 1) + DONE], "informational", id="one too many"),
        pytest.param(repeat(CONTINUE), "informational", id="informational answers without end"),
        pytest.param(repeat(CONTINUE * 1000), "informational", id="many in each packet"),
        pytest.param(repeat(HINTS), "longer than 16 KiB", id="early hints without end"),
        pytest.param([head_of(MAX_HEAD_OCTETS + 1)], "longer than 16 KiB", id="a head that is too long"),
        pytest.param([CONTINUE + head_of(MAX_HEAD_OCTETS)], "longer than 16 KiB", id="too long together"),
        pytest.param(chain([DONE[:-2]], repeat(b"x: y\r\n")), "longer than 16 KiB", id="headers without end"),
        pytest.param(chain([DONE[:-2]], repeat(b"x")), "longer than 16 KiB", id="a name without end"),
    ],
)
async def test_an_answer_beyond_the_limits_ends_the_post(
    ca: trustme.CA, ca_file: Path, notice: Notice, answer: Iterable[bytes], reason: str
) -> None:
    with receiving_raw(ca, lambda: answer) as receiver, pytest.raises(NotDelivered, match=reason):
        await channel_to(receiver.url, ca_file).send(notice)


async def test_a_certificate_for_another_name_is_refused(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    channel = channel_to(f"https://other.example.com:{receiver.server_port}/x", ca_file, Resolver(["127.0.0.1"]))

    with pytest.raises(NotDelivered, match="certificate"):
        await channel.send(notice)

    assert receiver.posted == []


async def test_an_untrusted_certificate_authority_is_refused(
    receiver: Receiver, tmp_path: Path, notice: Notice
) -> None:
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(stranger)

    with pytest.raises(NotDelivered, match="certificate"):
        await channel_to(receiver.url, stranger).send(notice)


async def test_a_silent_receiver_fails_at_the_total_deadline(receiver: Receiver, ca_file: Path, notice: Notice) -> None:
    receiver.released.clear()
    seconds = 1.0
    while not receiver.posted and seconds < DEADLINE_SECONDS:  # until the request was received in time
        seconds *= 2
        overtime = Overtime(asyncio.get_running_loop().time() + seconds)
        with pytest.raises(NotDelivered, match="no answer"):
            await channel_to(receiver.url, ca_file, seconds=seconds).send(notice)
        assert overtime.end() < 1

    await until(lambda: receiver.posted)


async def test_a_silent_resolver_fails_at_the_total_deadline(ca_file: Path, notice: Notice) -> None:
    async def silent(_host: str, _port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    channel = WebhookChannel("https://a.example/", SECRET, ca_file=ca_file, resolver=silent, total_seconds=0.1)

    with pytest.raises(NotDelivered, match=r"no answer within 0\.1 s"):
        await channel.send(notice)


async def test_a_refused_connection_is_reported_without_the_url(
    ca_file: Path, notice: Notice, closed_port: int
) -> None:
    channel = channel_to(f"https://127.0.0.1:{closed_port}/token-in-path", ca_file)

    with pytest.raises(NotDelivered) as fault:
        await channel.send(notice)

    assert "refused" in fault.value.reason.lower()
    assert "token-in-path" not in fault.value.reason


async def test_a_name_without_an_address_is_reported(ca_file: Path, notice: Notice) -> None:
    with pytest.raises(NotDelivered, match="cannot be resolved"):
        await channel_to("https://alerts.invalid/", ca_file, seconds=20).send(notice)


def test_an_empty_ca_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")

    with pytest.raises(ConfigurationError, match="DISPATCHER_CA_FILE"):
        WebhookChannel("https://a.example/", SECRET, ca_file=tmp_path / "ca.pem")
