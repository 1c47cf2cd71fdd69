"""The client of the management API returns counts or raises an error, and never zero for a missing count. The checks of
RabbitMQ's reports about our exchange and queues find everything that can lose messages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from dispatcher.broker.inspection import (
    OfflineMembers,
    consumer_timeout_in,
    delivery_limit_in,
    find_faults,
    find_offline_members,
    offline_members_in,
)
from dispatcher.broker.management import Management, QueueDepth
from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import Servers
from dispatcher.errors import BrokerUnavailable, ConfigurationError, TopologyError
from tests.broker.rabbit import Rabbit
from tests.providers.listeners import listening
from tests.waiting import DEADLINE_SECONDS, until_answer

PASSWORD = "hunter2"
COUNTS = b'{"messages": %b, "messages_ready": 3, "messages_unacknowledged": 0, "consumers": 0}'


@asynccontextmanager
async def impostor(reply: Callable[[bytes], bytes]) -> Any:
    """A management API that gives the test's reply to the first line of each request."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]))

    async with listening(answer) as port:
        yield Management(f"http://guest:{PASSWORD}@127.0.0.1:{port}")


def http(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nLocation: /elsewhere\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


async def test_the_version_and_depth_are_returned(management: Management, topology: Topology, rabbit: Rabbit) -> None:
    for _ in range(3):
        await rabbit.publish(topology.dlq, b"dead")

    async def is_counted() -> bool:
        with suppress(BrokerUnavailable):  # the queue is too new to have counts
            return await management.depth(topology.dlq) == QueueDepth(messages=3, ready=3, unacked=0, consumers=0)
        return False

    await until_answer(is_counted)
    assert (await management.version())[0].isdigit()


async def test_a_queue_that_does_not_exist_in_the_virtual_host_is_reported_and_its_name_is_escaped(
    servers: Servers, management: Management, topology: Topology
) -> None:
    other = Management(servers.management_url, vhost="other", timeout_seconds=DEADLINE_SECONDS)
    for where, queue in (management, f"{topology.dlq}.x"), (management, "../../overview?x#"), (other, topology.queue):
        with pytest.raises(TopologyError, match=re.escape(queue)):
            await where.depth(queue)


async def test_a_wrong_password_is_reported_and_not_shown(servers: Servers) -> None:
    place = servers.management_url.rpartition("@")[2]
    management = Management(f"http://nobody:{PASSWORD}@{place}", timeout_seconds=DEADLINE_SECONDS)

    for ask in (management.version, lambda: management.depth("q")):
        with pytest.raises(BrokerUnavailable, match="refuses the user name or password") as fault:
            await ask()
        assert PASSWORD not in str(fault.value)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{}", b"not json", b"[" * 50_000, b'{"messages": null}', b'{"messages": 3}',
        *(COUNTS % figure for figure in (b'"3"', b"true", b"-1", b"1e999", b"NaN", b"Infinity")),
        *(COUNTS % figure for figure in (b"9" * 4000, b"9" * 5000, b"9223372036854775808")),
        (COUNTS % b"3").replace(b'"messages_ready": 3', b'"messages_ready": -3'),
        b'{"rabbitmq_version": "\\u001b[2J"}', b'{"rabbitmq_version": "' + b"4" * 41 + b'"}',
    ],
)  # fmt: skip
async def test_a_reply_without_counts_is_a_failure(body: bytes) -> None:
    async with impostor(lambda _: http(body)) as management:
        with pytest.raises(BrokerUnavailable, match="no message counts"):
            await management.depth("q")
        with pytest.raises(BrokerUnavailable, match="does not answer like RabbitMQ"):
            await management.version()


@pytest.mark.parametrize("status", [301, 302, 307, 401, 403, 500, 503])
async def test_every_other_status_is_a_failure_and_redirects_are_not_followed(status: int) -> None:
    requests: list[bytes] = []

    def reply(request: bytes) -> bytes:
        requests.append(request)
        return http((COUNTS % b"0").replace(b": 3", b": 0"), status)

    async with impostor(reply) as management:
        for read in (partial(management.depth, "q"), partial(management.bindings, "q"), management.alarms):
            with pytest.raises(BrokerUnavailable) as fault:
                await read()
            assert PASSWORD not in str(fault.value)

    assert len(requests) == 3


async def test_one_node_that_answers_is_enough_and_else_the_error_names_every_node(
    servers: Servers, closed_port: int
) -> None:
    dead = [f"http://guest:{PASSWORD}@{host}:{closed_port}" for host in ("127.0.0.1", "127.0.0.2")]
    one = Management(",".join([dead[0], servers.management_url, dead[1]]), timeout_seconds=DEADLINE_SECONDS)
    assert (await one.version())[0].isdigit()

    with pytest.raises(BrokerUnavailable, match="cannot be reached: connection refused") as fault:
        await Management(",".join(dead)).version()

    assert "127.0.0.1" in str(fault.value)
    assert "127.0.0.2" in str(fault.value)
    assert PASSWORD not in str(fault.value)


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:port", f"//u:{PASSWORD}@h"])
def test_an_invalid_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigurationError) as mistake:
        Management(url)

    assert PASSWORD not in str(mistake.value)


# Faults of the exchange and queues.
async def fault_texts(management: Management, topology: Topology) -> list[str]:
    return [str(fault) for fault in await find_faults(management, topology)]


MakeQueue = Callable[[str, dict[str, Any]], Awaitable[None]]


@pytest.fixture
async def remake(amqp_url: str, undeclared: Topology, rabbit: Rabbit) -> MakeQueue:
    """Declares everything; then replaces one queue by a queue with other arguments."""

    async def replaced(queue: str, arguments: dict[str, Any]) -> None:
        await declare(amqp_url, undeclared)
        await rabbit.delete_queue(queue)
        await rabbit.declare_queue(queue, **arguments)
        await rabbit.bind_queue(queue, undeclared.exchange)

    return replaced


async def test_every_missing_object_is_named(management: Management, topology_names: Topology) -> None:
    words = await fault_texts(management, topology_names)

    assert len(words) == 1 + len(topology_names.queues)
    for name in (topology_names.exchange, *topology_names.queues):
        assert any(f" {name} does not exist. Run `dispatcher init`." in one for one in words)


async def test_a_missing_binding_is_named(management: Management, topology: Topology, rabbit: Rabbit) -> None:
    await rabbit.unbind_queue(topology.dlq, topology.exchange)

    (words,) = await until_answer(lambda: fault_texts(management, topology))

    assert words.startswith(f"The queue {topology.dlq} is not bound to the exchange {topology.exchange}")


class WithPolicy:
    """RabbitMQ's reports of queues, with a policy. RabbitMQ itself reports a new policy only after five seconds."""

    def __init__(self, management: Management, definition: Mapping[str, int]) -> None:
        self._management = management
        self._fields = {"policy": "theirs", "effective_policy_definition": definition}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._management, name)

    async def queue(self, name: str) -> dict[str, Any]:
        return {**(await self._management.queue(name) or {}), **self._fields}


async def test_a_policy_that_loses_dead_letters_is_named_with_its_remedy(
    management: Management, topology: Topology
) -> None:
    reports = cast("Management", WithPolicy(management, {"max-length": 10, "delivery-limit": 3}))
    (nowhere, *_) = await fault_texts(management, replace(topology, exchange="nowhere"))

    words = " ".join(await fault_texts(reports, topology))

    assert f"{topology.dlq} drops its oldest messages when it is full: the policy theirs sets max-length to 10" in words
    assert "exclude ours: rabbitmqctl set_policy -p" in words
    assert nowhere.startswith("The exchange nowhere does not exist.")


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        ({"x-max-length": 5, "x-overflow": "reject-publish"}, []),  # a full queue that rejects publishes loses nothing
        ({"x-message-ttl": 1000, "x-max-length": 5}, ["x-message-ttl is 1000", "x-max-length is 5"]),
    ],
)
async def test_arguments_that_lose_dead_letters_are_named(
    management: Management, undeclared: Topology, remake: MakeQueue, arguments: dict[str, Any], faults: list[str]
) -> None:
    await remake(undeclared.dlq, {"x-queue-type": "classic", **arguments})

    remedy = "Remove this argument or policy, because it loses messages silently."
    words = await fault_texts(management, undeclared)
    assert [one.partition(": ")[2] for one in words] == [f"its argument {each}. {remedy}" for each in faults]


async def test_a_send_queue_without_dead_lettering_and_with_a_low_delivery_limit_is_named(
    management: Management, undeclared: Topology, remake: MakeQueue
) -> None:
    await remake(undeclared.queue, {"x-queue-type": "quorum", "x-delivery-limit": 20})

    limit, exchange, _ = await fault_texts(management, undeclared)

    assert "dead-letters messages about emails that were delivered 20 times" in limit
    assert f"dead-letter-exchange is not set but must be {undeclared.exchange}" in exchange


@pytest.mark.parametrize(
    ("members", "online", "offline", "has_majority"),
    [("abc", "ac", ("b",), True), ("abc", "b", ("a", "c"), False), ("ab", "a", ("b",), False)],
)
def test_a_quorum_queue_reports_its_offline_members_and_whether_it_has_a_majority(
    members: str, online: str, offline: tuple[str, ...], *, has_majority: bool
) -> None:
    found = offline_members_in({"name": "q", "members": list(members), "online": list(online)})

    assert found == OfflineMembers("q", offline, has_majority=has_majority)


async def test_a_queue_with_all_members_online_is_not_reported(management: Management, topology: Topology) -> None:
    await until_answer(lambda: management.queue(topology.queue), lambda found: (found or {}).get("members"))

    assert await find_offline_members(management, topology) == []
    assert offline_members_in({"name": "classic"}) is None


@pytest.mark.parametrize(
    ("argument", "policy", "default", "limit"),
    [
        (1_000_000, None, 20, 1_000_000), (1_000_000, 20, None, 20), (30, 1_000_000, None, 30), (None, 40, 20, 40),
        (None, None, 20, 20), (None, None, None, None), (-1, 20, 20, 20), (50, -1, 20, 50), (-1, None, 20, None),
    ],
)  # fmt: skip
def test_the_lowest_delivery_limit_counts(
    argument: int | None, policy: int | None, default: int | None, limit: int | None
) -> None:
    arguments = {} if argument is None else {"x-delivery-limit": argument}
    fields = {
        "arguments": {"x-queue-type": "quorum", **arguments},
        "effective_policy_definition": [] if policy is None else {"delivery-limit": policy},
    }

    assert delivery_limit_in(fields, default) == limit
    assert delivery_limit_in({**fields, "arguments": {"x-queue-type": "classic"}}, default) is None


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({"arguments": {}, "effective_policy_definition": []}, None),
        ({"arguments": {"x-consumer-timeout": 60000}, "effective_policy_definition": {"consumer-timeout": 1}}, 60.0),
        ({"effective_policy_definition": {"consumer-timeout": 90000}}, 90.0),
    ],
)
def test_the_consumer_timeout_comes_from_the_argument_or_the_policy(fields: dict[str, object], seconds: float) -> None:
    assert consumer_timeout_in(fields) == seconds
    with pytest.raises(BrokerUnavailable, match="not a number"):
        consumer_timeout_in({"arguments": {"x-consumer-timeout": "soon"}})
