"""Connections to RabbitMQ: errors on opening, how connections end, and messages from other applications."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit, urlunsplit

import pytest
import trustme
from pika.spec import BasicProperties

from dispatcher.broker.connection import (
    MAX_QUEUE_QUERIES,
    NEXT_NODE_SECONDS,
    Channel,
    first_of,
    open_connection,
    parameters,
)
from dispatcher.broker.faults import NOT_FOUND, ChannelClosed
from dispatcher.broker.topology import Topology
from dispatcher.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Rabbit

PASSWORD = "hunter2"
STRANGER = f"nobody:{PASSWORD}"


def changed(amqp_url: str, *, credentials: str, place: str | None = None, path: str | None = None) -> str:
    """The URL with a different user, and perhaps another server or virtual host."""
    parts = urlsplit(amqp_url)
    netloc = f"{credentials}@{place or parts.netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=netloc, path=parts.path if path is None else path))


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead(amqp_url: str, closed_port: int) -> str:
    return changed(amqp_url, credentials=STRANGER, place=f"127.0.0.1:{closed_port}")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("password", "wrong user name or password"),
        ("virtual host", "virtual host"),
        ("port", "RabbitMQ at 127.0.0.1:{} cannot be reached: connection refused"),
        ("name", "host name cannot be resolved"),
        ("silence", "it did not answer in time"),
        ("tls", "TLS failed"),
    ],
)
async def test_why_a_connection_cannot_be_opened_is_reported_without_the_password(
    amqp_url: str, dead: str, silent: str, closed_port: int, fault: str, words: str
) -> None:
    urls = {
        "password": changed(amqp_url, credentials=STRANGER),
        "virtual host": changed(amqp_url, credentials=urlsplit(amqp_url).netloc.rpartition("@")[0], path="/no-such"),
        "port": dead,
        "name": f"amqp://{STRANGER}@no-such-host.invalid/",
        "silence": f"amqp://{STRANGER}@{silent}/?stack_timeout=1&socket_timeout=0.5",
        "tls": amqp_url.replace("amqp://", "amqps://"),
    }

    with pytest.raises(BrokerUnavailable) as reported:
        await open_connection(urls[fault], name="test")

    assert words.format(closed_port) in str(reported.value)
    assert PASSWORD not in str(reported.value)


@pytest.mark.parametrize(
    "url",
    [
        f"amqp://u:{PASSWORD}@h/?no_such_option={PASSWORD}",
        f"amqp://u:{PASSWORD}@h:99999999/",
        f"amqp://u:{PASSWORD}@h/?heartbeat={PASSWORD}",
        f"amqps://u:{PASSWORD}@h/?ssl_options={{{PASSWORD}",
        "amqp://u@h/",
        f"http5://u:{PASSWORD}@h/",
    ],
)
def test_an_invalid_url_is_a_configuration_mistake_and_is_not_quoted(url: str) -> None:
    with pytest.raises(ConfigurationError, match="DISPATCHER_AMQP_URL") as mistake:
        parameters(url)

    assert PASSWORD not in str(mistake.value)
    assert mistake.value.__suppress_context__


def test_all_urls_must_name_the_same_virtual_host() -> None:
    nodes = parameters("amqp://u:p@a/mail, amqps://u:p,q@b:5671/mail")
    with pytest.raises(ConfigurationError, match="different virtual hosts"):
        parameters("amqp://u:p@a/mail,amqp://u:p@b/%2F")

    assert [(each.host, each.port) for each in nodes] == [("a", 5672), ("b", 5671)]
    assert nodes[1].credentials.password == "p,q"


async def test_a_frozen_node_delays_the_next_one_only_briefly(amqp_url: str, silent: str) -> None:
    frozen = changed(amqp_url, credentials="u:p", place=silent)

    async with asyncio.timeout(3 * NEXT_NODE_SECONDS):
        connection = await open_connection(f"{frozen},{frozen},{amqp_url}", name="test")

    await connection.close()


async def test_the_error_names_every_unreachable_node(amqp_url: str, closed_port: int, dead: str) -> None:
    with pytest.raises(BrokerRefused, match="wrong user name or password") as fault:
        await open_connection(f"{dead},{changed(amqp_url, credentials=STRANGER)}", name="test")

    assert f"127.0.0.1:{closed_port} cannot be reached: connection refused" in str(fault.value)
    assert "DISPATCHER_AMQP_URL" in str(fault.value.remedy)
    assert PASSWORD not in str(fault.value)


async def test_a_frozen_node_is_detected_within_the_heartbeat_timeout_and_an_idle_connection_stays_open(
    amqp_url: str, proxy: Proxy
) -> None:
    async with await open_connection(f"{amqp_url}?heartbeat=1", name="test") as idle:
        frozen = await open_connection(f"{proxy.url}?heartbeat=1", name="test")
        proxy.freeze_node()

        async with asyncio.timeout(4):
            assert await frozen.lost == "the server stopped sending heartbeats"
        await first_of(idle.lost, seconds=1)
        assert not idle.lost.done()


def test_a_ca_file_is_trusted_instead_of_the_system(tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")

    context = parameters("amqps://u:p@h/", ca_file=tmp_path / "ca.pem")[0].ssl_options.context

    assert len(context.get_ca_certs()) == 1
    assert context.check_hostname


@pytest.mark.parametrize("text", [None, "-----BEGIN CERT"])
async def test_a_ca_file_that_is_being_replaced_is_a_temporary_fault(tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "ca.pem").write_text(text)

    with pytest.raises(BrokerUnavailable, match="DISPATCHER_CA_FILE"):
        await open_connection("amqps://u:p@127.0.0.1/", name="test", ca_file=tmp_path / "ca.pem")


async def test_a_refusal_closes_the_channel_but_not_the_connection(amqp_url: str) -> None:
    async with await open_connection(amqp_url, name="test") as connection:
        channel = await connection.open_channel()
        for _ in range(2):
            with pytest.raises(ChannelClosed, match="no such queue") as fault:
                await channel.call(channel.raw.queue_declare, queue="no such queue", passive=True)
            assert fault.value.code == NOT_FOUND
        await connection.open_channel()


async def test_close_is_idempotent_and_later_calls_report_it(amqp_url: str) -> None:
    connection = await open_connection(amqp_url, name="test")
    closing = asyncio.create_task(connection.close())
    await asyncio.sleep(0)
    with pytest.raises(BrokerUnavailable, match="closing"):
        await connection.open_channel()
    await connection.close()
    await closing
    connection.abort()

    assert connection.lost.result() == "we closed the connection"
    with pytest.raises(BrokerUnavailable, match="we closed the connection"):
        await connection.open_channel()


async def test_a_cut_connection_fails_pending_calls(proxy: Proxy) -> None:
    connection = await open_connection(proxy.url, name="test")
    channel = await connection.open_channel()
    proxy.freeze()
    waiting = asyncio.create_task(channel.call(channel.raw.queue_declare, queue="x", passive=True))
    await asyncio.sleep(0)
    proxy.cut()

    with pytest.raises(BrokerUnavailable, match="was interrupted"):
        await waiting
    assert "was interrupted" in await connection.lost


async def test_close_does_not_wait_for_a_silent_server(proxy: Proxy) -> None:
    connection = await open_connection(proxy.url, name="test")
    proxy.freeze()

    await connection.close(within_seconds=0.05)

    assert connection.lost.done()


def table(kind: bytes, value: bytes) -> bytes:
    """An AMQP table with one entry, whose name is k."""
    entry = b"\x01k" + kind + value
    return struct.pack(">I", len(entry)) + entry


class StrangeProperties(BasicProperties):  # type: ignore[misc]  # pika has no types
    """Message headers as other applications may write them."""

    def __init__(self, headers: bytes) -> None:
        super().__init__()
        self._strange = headers

    def encode(self) -> list[bytes]:
        return [struct.pack(">H", self.FLAG_HEADERS), self._strange]


async def test_headers_that_pika_cannot_parse_do_not_end_the_connection(topology: Topology, rabbit: Rabbit) -> None:
    strange = [
        table(b"T", struct.pack(">Q", 1_790_000_000_000)),  # milliseconds
        table(b"A", struct.pack(">I", 9) + b"T" + b"\x7f" * 8),
        reduce(lambda inner, _: table(b"F", inner), range(3000), table(b"V", b"")),
    ]
    for headers in strange:
        await rabbit.publish(topology.queue, b"strange", StrangeProperties(headers))
        await rabbit.publish(topology.queue, b"neighbour")

    taken = await rabbit.take_all(topology.queue, 6)

    assert [message.body for message in taken] == [b"strange", b"neighbour"] * 3
    assert [message.properties.headers for message in taken[::2]] == [None] * 3


class SlowBroker:
    """A channel whose answers take a quarter of a second: the queue has these numbers of messages, one after the other,
    like in RabbitMQ while a quorum queue starts."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.looks = 0
        self._counts = counts

    def add_on_close_callback(self, _: object) -> None:
        """Ignores the callback, because the channel never closes."""

    def queue_declare(self, *, callback: Callable[[object], None], **_: object) -> None:
        answer = SimpleNamespace(method=SimpleNamespace(message_count=self._counts[self.looks], consumer_count=0))
        self.looks += 1
        asyncio.get_running_loop().call_later(0.25, callback, answer)


@pytest.mark.parametrize("counts", [[0, 0, 7], [7], [0] * MAX_QUEUE_QUERIES])
async def test_a_late_report_of_an_empty_queue_is_repeated(counts: list[int]) -> None:
    broker = SlowBroker(counts)

    found = await Channel(broker).find_queue("q")

    assert (broker.looks, found.message_count) == (len(counts), counts[-1])
