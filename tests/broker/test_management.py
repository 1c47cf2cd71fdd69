"""The client of the management API returns counts or raises an error. It never returns zero for a missing count."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

import pytest

from dispatcher.broker.inspection import consumer_timeout_in, find_faults, find_offline_members
from dispatcher.broker.management import Management, QueueDepth
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from dispatcher.errors import BrokerUnavailable, ConfigurationError, TopologyError
from tests.broker.rabbit import Rabbit
from tests.providers.listeners import listening
from tests.waiting import DEADLINE_SECONDS, until_answer

PASSWORD = "hunter2"


class Impostor(HTTPServer):
    """A server that returns whatever a test sets."""

    status = 200
    body = b"{}"
    bindings = b"[]"
    requests = 0

    @property
    def url(self) -> str:
        return f"http://guest:{PASSWORD}@127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """Answers one request to the fake server."""

    server: Impostor

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(self.server.status)
        self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        self.end_headers()
        self.wfile.write(self.server.bindings if self.path.endswith("/bindings") else self.server.body)

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    """A fake management API."""
    with Impostor(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_the_version_is_returned(servers: Servers) -> None:
    assert (await Management(servers.management_url, timeout_seconds=DEADLINE_SECONDS).version())[0].isdigit()


async def test_the_depth_is_returned(servers: Servers, topology: Topology, rabbit: Rabbit) -> None:
    management = Management(servers.management_url, timeout_seconds=DEADLINE_SECONDS)
    for _ in range(3):
        await rabbit.publish(topology.dlq, b"dead")

    async def is_counted() -> bool:
        with suppress(BrokerUnavailable):  # the queue is too new to have counts
            return await management.depth(topology.dlq) == QueueDepth(messages=3, ready=3, unacked=0, consumers=0)
        return False

    await until_answer(is_counted)


async def test_a_missing_queue_is_reported(servers: Servers, topology_names: Topology) -> None:
    with pytest.raises(TopologyError, match=topology_names.dlq):
        await Management(servers.management_url, timeout_seconds=DEADLINE_SECONDS).depth(topology_names.dlq)


async def test_names_are_escaped_in_the_path(servers: Servers) -> None:
    with pytest.raises(TopologyError):
        await Management(servers.management_url, timeout_seconds=DEADLINE_SECONDS).depth("../../overview?x#")


async def test_a_wrong_password_is_reported_and_not_shown(servers: Servers) -> None:
    url = servers.management_url.rpartition("@")
    management = Management(f"http://nobody:{PASSWORD}@{url[2]}", timeout_seconds=DEADLINE_SECONDS)

    for ask in (management.version, lambda: management.depth("q")):
        with pytest.raises(BrokerUnavailable, match="refuses the user name or password") as fault:
            await ask()
        assert PASSWORD not in str(fault.value)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{}", b"not json", b"[" * 50_000, b'{"messages": null}', b'{"messages": 3}',
        b'{"messages": "3", "messages_ready": 3, "messages_unacknowledged": 0, "consumers": 0}',
        b'{"messages": true, "messages_ready": 3, "messages_unacknowledged": 0, "consumers": 0}',
        *(b'{"messages": %b, "messages_ready": 3, "messages_unacknowledged": 0, "consumers": 0}' % figure
          for figure in (b"-1", b"1e999", b"NaN", b"Infinity", b"9" * 4000, b"9" * 5000, b"9223372036854775808")),
        b'{"messages": 3, "messages_ready": -3, "messages_unacknowledged": 0, "consumers": 0}',
        b'{"rabbitmq_version": "\\u001b[2J"}', b'{"rabbitmq_version": "' + b"4" * 41 + b'"}',
    ],
)  # fmt: skip
async def test_a_reply_without_counts_is_a_failure(impostor: Impostor, body: bytes) -> None:
    impostor.body = body

    with pytest.raises(BrokerUnavailable, match="no message counts"):
        await Management(impostor.url).depth("q")
    with pytest.raises(BrokerUnavailable, match="does not answer like RabbitMQ"):
        await Management(impostor.url).version()


@pytest.mark.parametrize(
    "reply",
    [
        b"\x1b[2Jowned\r\n\r\n",
        b"HTTP/1.1 \x1b[2J\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: \x1b[2J\r\n" * 200,
        b"",
        b"\xff" * 70_000,
    ],
)
async def test_an_answer_that_is_not_http_is_not_quoted(reply: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)

    async with listening(answer) as port:
        with pytest.raises(BrokerUnavailable) as fault:
            await Management(f"http://guest:{PASSWORD}@127.0.0.1:{port}").version()

    assert str(fault.value).isprintable()
    assert "owned" not in str(fault.value)


REPORTED: Final[dict[str, object]] = {
    "name": "q", "durable": True, "type": "quorum", "members": [{"a": []}, "\x1b[2J"] * 3, "online": [[]],
    "arguments": {"x-message-ttl": "\x1b[2J" * 9000, "x-dead-letter-exchange": ["\x1b"], "x-overflow": []},
    "policy": "\x1b[1m", "effective_policy_definition": {"expires": {"\x9b": 1}},
    "source": [], "routing_key": {}, "rabbitmq_version": "4.0.5",
}  # fmt: skip


async def test_reports_of_a_hostile_node_contain_no_control_characters(impostor: Impostor) -> None:
    topology = Topology(exchange="e", queue="q", dlq="d")
    impostor.body = json.dumps(REPORTED).encode()
    impostor.bindings = json.dumps([REPORTED]).encode()
    management = Management(impostor.url)

    faults = [*await find_faults(management, topology), *await find_offline_members(management, topology)]

    assert len(faults) > 6
    for fault in faults:
        words = str(fault)
        assert words.isprintable()
        assert len(words) < 1000


@pytest.mark.parametrize("timeout", [-1, 10**400, True, "1800000", [], 1.5])
def test_a_consumer_timeout_that_is_not_a_number_is_a_failure(timeout: object) -> None:
    with pytest.raises(BrokerUnavailable, match="consumer timeout that is not a number"):
        consumer_timeout_in({"arguments": {"x-consumer-timeout": timeout}})


@pytest.mark.parametrize("status", [301, 302, 307, 401, 403, 500, 503])
async def test_every_other_status_is_a_failure_and_redirects_are_not_followed(impostor: Impostor, status: int) -> None:
    impostor.status = status
    impostor.body = b'{"messages": 0, "messages_ready": 0, "messages_unacknowledged": 0, "consumers": 0}'

    with pytest.raises(BrokerUnavailable) as fault:
        await Management(impostor.url).depth("q")

    assert impostor.requests == 1
    assert PASSWORD not in str(fault.value)


async def test_one_node_that_answers_is_enough(servers: Servers, closed_port: int) -> None:
    dead = f"http://guest:{PASSWORD}@127.0.0.1:{closed_port}"
    management = Management(f"{dead},{servers.management_url},{dead}", timeout_seconds=DEADLINE_SECONDS)

    assert (await management.version())[0].isdigit()


async def test_the_error_names_every_node_that_does_not_answer(closed_port: int) -> None:
    nodes = [f"http://guest:{PASSWORD}@{host}:{closed_port}" for host in ("127.0.0.1", "127.0.0.2")]
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1.*127\.0\.0\.2|127\.0\.0\.2.*127\.0\.0\.1") as fault:
        await Management(",".join(nodes)).version()

    assert PASSWORD not in str(fault.value)


async def test_a_closed_port_is_reported(closed_port: int) -> None:
    with pytest.raises(BrokerUnavailable, match="cannot be reached: connection refused"):
        await Management(f"http://guest:{PASSWORD}@127.0.0.1:{closed_port}").version()


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:port", f"//u:{PASSWORD}@h"])
def test_an_invalid_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigurationError) as mistake:
        Management(url)

    assert PASSWORD not in str(mistake.value)


async def test_a_queue_of_another_virtual_host_is_not_found(servers: Servers, topology: Topology) -> None:
    with pytest.raises(TopologyError):
        await Management(servers.management_url, vhost="other", timeout_seconds=DEADLINE_SECONDS).depth(topology.queue)
