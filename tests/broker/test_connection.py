"""Tests connections to RabbitMQ: errors on opening, how connections end, and messages from other applications."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit, urlunsplit

import pytest
import uvloop
from pika import exceptions
from pika.spec import BasicProperties

from dispatcher.broker.connection import (
    MAX_QUEUE_QUERIES,
    NEXT_NODE_SECONDS,
    Channel,
    first_of,
    open_connection,
    parameters,
)
from dispatcher.broker.faults import NOT_FOUND, ChannelClosed, reason
from dispatcher.broker.topology import Topology
from dispatcher.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Rabbit, eventually

PASSWORD = "hunter2"
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBdjCCARugAwIBAgIUXRNX+D5LR+j3s9EFay8a8BpAtSwwCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEdGVzdDAgFw0yNjExMjEwNzQyNDFaGA8yMTI2MTAyODA3NDI0
MVowDzENMAsGA1UEAwwEdGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABPR8
5JE/dfec76I4TVkpUM+wSOZIaSXcYHuHaJQpZIUn+OpXK4f/6tNtrMjeCXWWk5gh
mRTRv4BvCI7z31Hc6ROjUzBRMB0GA1UdDgQWBBRO6pz7Lg5fOayo9dHHkkDW4WaZ
NTAfBgNVHSMEGDAWgBRO6pz7Lg5fOayo9dHHkkDW4WaZNTAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0kAMEYCIQDLWPIsqesWSfJ91/vl6IOB/XXgR0Yf56uO
YQ4Ypj0+pQIhAP3T4XcmhbNYdxS9vRemqL5J4ZtQtB1KpTkx+4+Fecne
-----END CERTIFICATE-----
"""


def changed(amqp_url: str, *, credentials: str | None = None, path: str | None = None) -> str:
    """The URL with a different user or virtual host."""
    parts = urlsplit(amqp_url)
    place = parts.netloc.rpartition("@")[2]
    netloc = parts.netloc if credentials is None else f"{credentials}@{place}"
    return urlunsplit(parts._replace(netloc=netloc, path=parts.path if path is None else path))


async def test_a_wrong_password_is_reported_and_not_shown(amqp_url: str) -> None:
    with pytest.raises(BrokerUnavailable, match="wrong user name or password") as fault:
        await open_connection(changed(amqp_url, credentials=f"nobody:{PASSWORD}"), name="test")

    assert PASSWORD not in str(fault.value)


async def test_an_unknown_virtual_host_is_reported(amqp_url: str) -> None:
    with pytest.raises(BrokerUnavailable, match="virtual host"):
        await open_connection(changed(amqp_url, path="/no-such-host"), name="test")


async def test_a_closed_port_is_reported_with_the_address(closed_port: int) -> None:
    with pytest.raises(BrokerUnavailable, match=rf"RabbitMQ at 127\.0\.0\.1:{closed_port} .*: connection refused"):
        await open_connection(f"amqp://u:{PASSWORD}@127.0.0.1:{closed_port}/", name="test")


async def test_an_unknown_host_name_is_reported() -> None:
    with pytest.raises(BrokerUnavailable, match="host name cannot be resolved"):
        await open_connection("amqp://u:p@no-such-host.invalid/", name="test")


async def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://u:p@127.0.0.1:{silent.getsockname()[1]}/?stack_timeout=1&socket_timeout=0.5"
        with pytest.raises(BrokerUnavailable, match="it did not answer in time"):
            await open_connection(url, name="test")


async def test_a_server_without_tls_is_reported(amqp_url: str) -> None:
    with pytest.raises(BrokerUnavailable, match="TLS failed"):
        await open_connection(amqp_url.replace("amqp://", "amqps://"), name="test")


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


def test_a_url_may_override_our_defaults() -> None:
    (ours,), (theirs,) = parameters("amqp://u:p@h/"), parameters("amqp://u:p@h/?heartbeat=7")

    assert (ours.heartbeat, ours.connection_attempts) == (10, 1)
    assert theirs.heartbeat == 7


def test_all_urls_must_name_the_same_virtual_host() -> None:
    nodes = parameters("amqp://u:p@a/mail, amqps://u:p,q@b:5671/mail")
    with pytest.raises(ConfigurationError, match="different virtual hosts"):
        parameters("amqp://u:p@a/mail,amqp://u:p@b/%2F")

    assert [(each.host, each.port) for each in nodes] == [("a", 5672), ("b", 5671)]
    assert nodes[1].credentials.password == "p,q"


async def test_one_reachable_node_is_enough(amqp_url: str, closed_port: int) -> None:
    dead = f"amqp://u:{PASSWORD}@127.0.0.1:{closed_port}{urlsplit(amqp_url).path}"
    for _ in range(4):
        async with await open_connection(f"{dead},{amqp_url},{dead}", name="test") as connection:
            assert not connection.lost.done()


async def test_a_frozen_node_delays_the_next_one_only_briefly(amqp_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        frozen = f"amqp://u:p@127.0.0.1:{silent.getsockname()[1]}{urlsplit(amqp_url).path}"
        async with asyncio.timeout(3 * NEXT_NODE_SECONDS):
            connection = await open_connection(f"{frozen},{frozen},{amqp_url}", name="test")
        await connection.close()


async def test_connections_spread_over_the_nodes(amqp_url: str) -> None:
    async with Proxy(amqp_url) as one, Proxy(amqp_url) as another:
        for _ in range(30):
            await (await open_connection(f"{one.url},{another.url}", name="test")).close()

        assert one.connections
        assert another.connections


async def test_the_error_names_every_unreachable_node(amqp_url: str, closed_port: int) -> None:
    dead = f"amqp://u:{PASSWORD}@127.0.0.1:{closed_port}{urlsplit(amqp_url).path}"
    stranger = changed(amqp_url, credentials=f"nobody:{PASSWORD}")
    with pytest.raises(BrokerRefused, match="wrong user name or password") as fault:
        await open_connection(f"{dead},{stranger}", name="test")

    assert f"127.0.0.1:{closed_port} cannot be reached: connection refused" in str(fault.value)
    assert "DISPATCHER_AMQP_URL" in str(fault.value.remedy)
    assert PASSWORD not in str(fault.value)


async def test_a_frozen_node_is_detected_within_the_heartbeat_timeout(proxy: Proxy) -> None:
    connection = await open_connection(f"{proxy.url}?heartbeat=1", name="test")
    proxy.freeze_node()

    async with asyncio.timeout(4):
        assert await connection.lost == "the server stopped sending heartbeats"


async def test_an_idle_connection_stays_open(amqp_url: str) -> None:
    connection = await open_connection(f"{amqp_url}?heartbeat=1", name="test")
    await first_of(connection.lost, seconds=2.5)

    assert not connection.lost.done()
    await connection.close()


def test_a_ca_file_is_trusted_instead_of_the_system(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text(CERTIFICATE)

    context = parameters("amqps://u:p@h/", ca_file=ca_file)[0].ssl_options.context

    assert len(context.get_ca_certs()) == 1
    assert context.check_hostname


async def test_a_ca_file_that_is_being_replaced_is_a_temporary_fault(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    with pytest.raises(BrokerUnavailable, match="DISPATCHER_CA_FILE"):
        await open_connection("amqps://u:p@127.0.0.1/", name="test", ca_file=ca_file)

    ca_file.write_text("-----BEGIN CERT")
    with pytest.raises(BrokerUnavailable, match="DISPATCHER_CA_FILE"):
        await open_connection("amqps://u:p@127.0.0.1/", name="test", ca_file=ca_file)


async def test_a_refusal_closes_the_channel_but_not_the_connection(amqp_url: str) -> None:
    async with await open_connection(amqp_url, name="test") as connection:
        channel = await connection.open_channel()
        with pytest.raises(ChannelClosed) as fault:
            await channel.call(channel.raw.queue_declare, queue="no such queue", passive=True)
        with pytest.raises(ChannelClosed):
            await channel.call(channel.raw.queue_declare, queue="no such queue", passive=True)
        await connection.open_channel()

    assert fault.value.code == NOT_FOUND
    assert "no such queue" in fault.value.text


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


async def test_a_cancelled_connect_leaves_no_connection(proxy: Proxy) -> None:
    proxy.freeze()
    connecting = asyncio.create_task(open_connection(proxy.url, name="test"))
    await eventually(lambda: proxy.connections, "the connection")
    connecting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await connecting


def test_it_works_under_uvloop(amqp_url: str) -> None:
    async def there_and_back() -> str:
        async with await open_connection(amqp_url, name="test") as connection:
            await connection.open_channel()
        return connection.lost.result()

    assert uvloop.run(there_and_back()) == "we closed the connection"


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


@pytest.mark.parametrize(
    "headers",
    [
        table(b"T", struct.pack(">Q", 1_790_000_000_000)),  # milliseconds
        table(b"A", struct.pack(">I", 9) + b"T" + b"\x7f" * 8),
        reduce(lambda inner, _: table(b"F", inner), range(3000), table(b"V", b"")),
    ],
    ids=["milliseconds", "nested", "deep"],
)
async def test_headers_that_pika_cannot_parse_do_not_end_the_connection(
    topology: Topology, rabbit: Rabbit, headers: bytes
) -> None:
    await rabbit.publish(topology.queue, b"strange", StrangeProperties(headers))
    await rabbit.publish(topology.queue, b"neighbour")

    first, second = await rabbit.take_all(topology.queue, 2)

    assert (first.body, first.properties.headers) == (b"strange", None)
    assert second.body == b"neighbour"


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(exceptions).values()
        if isinstance(kind, type) and issubclass(kind, exceptions.AMQPConnectionError)
    ],
)
def test_every_exception_of_pika_has_a_text_of_ours(kind: type[Exception]) -> None:
    error = kind(320, "CONNECTION_FORCED") if issubclass(kind, exceptions.ConnectionClosed) else kind()

    assert not reason(error).startswith(kind.__name__)
    assert " " in reason(error)


class SlowBroker:
    """A fake channel. It first reports the queue as empty, like RabbitMQ while a quorum queue starts; each answer takes
    `seconds`."""

    def __init__(self, *, looks_in_vain: int, messages: int, seconds: float) -> None:
        self.looks = 0
        self._looks_in_vain = looks_in_vain
        self._messages = messages
        self._seconds = seconds

    def add_on_close_callback(self, _: object) -> None:
        """Ignores the callback, because the channel never closes."""

    def queue_declare(self, *, callback: Callable[[object], None], **_: object) -> None:
        """Answers like pika's channel."""
        self.looks += 1
        count = 0 if self.looks <= self._looks_in_vain else self._messages
        answer = SimpleNamespace(method=SimpleNamespace(message_count=count, consumer_count=0))
        asyncio.get_running_loop().call_later(self._seconds, callback, answer)


@pytest.mark.parametrize(
    ("broker", "looks", "messages"),
    [
        (SlowBroker(looks_in_vain=2, messages=7, seconds=0.25), 3, 7),
        (SlowBroker(looks_in_vain=0, messages=7, seconds=0.25), 1, 7),
        (SlowBroker(looks_in_vain=0, messages=0, seconds=0.25), MAX_QUEUE_QUERIES, 0),
    ],
    ids=["said to be empty twice", "slow", "slow and empty"],
)
async def test_a_late_report_of_an_empty_queue_is_repeated(broker: SlowBroker, looks: int, messages: int) -> None:
    found = await Channel(broker).find_queue("q")

    assert (broker.looks, found.message_count) == (looks, messages)
