"""What `init` creates and prints, which faults prevent `run` from starting, and what each user may do."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import pytest
from pika.spec import BasicProperties

from dispatcher.broker.connection import open_connection
from dispatcher.broker.faults import ACCESS_REFUSED, ChannelClosed
from dispatcher.broker.inspection import find_faults
from dispatcher.broker.management import Management
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import DELIVERY_LIMIT, Topology, declare, depths, difference, users_of, verify
from dispatcher.config import load
from dispatcher.dev.servers import Servers
from dispatcher.errors import TopologyError
from tests.broker.rabbit import Operator, Rabbit
from tests.waiting import DEADLINE_SECONDS, until_answer


def test_all_names_come_from_the_settings_and_each_lane_has_a_send_queue_that_dead_letters_to_the_one_dlq() -> None:
    given = {"QUEUE": "q", "DLQ": "dlq", "LANES": "otp, normal", "QUEUE_TYPE": "classic"}
    topology = Topology.of(load({f"DISPATCHER_{name}": value for name, value in given.items()}))

    assert topology == Topology("email.dispatcher", "q", "dlq", "classic", lanes=("otp", "normal"))
    assert topology.send_queues == {"otp": "q.otp", "normal": "q"}
    assert topology.queues == ("dlq", "q.otp", "q")
    assert topology.arguments("q.otp") == topology.arguments("q")
    assert topology.variable("q.otp") == "DISPATCHER_QUEUE"


def test_a_quorum_queue_dead_letters_at_least_once_and_has_no_low_delivery_limit() -> None:
    topology = Topology("x", "x.send", "x.dlq")

    assert topology.arguments("x.send") == {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "x",
        "x-dead-letter-routing-key": "x.dlq",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-delivery-limit": DELIVERY_LIMIT,
    }
    assert topology.arguments("x.dlq") == {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_declaring_twice_changes_nothing(amqp_url: str, undeclared: Topology, queue_type: str) -> None:
    topology = replace(undeclared, queue_type=queue_type)

    assert await declare(amqp_url, topology) == [
        f"declared exchange {topology.exchange} (direct, durable)",
        *[f"declared queue {queue} ({queue_type}, durable)" for queue in topology.queues],
    ]
    assert await declare(amqp_url, topology) == [
        f"exchange {topology.exchange} already exists",
        *[f"queue {queue} already exists" for queue in topology.queues],
    ]
    await verify(amqp_url, topology)


async def test_declare_creates_only_missing_objects(amqp_url: str, topology: Topology, rabbit: Rabbit) -> None:
    await rabbit.publish(topology.dlq, b"kept")
    await rabbit.delete_queue(topology.queue)

    words = await declare(amqp_url, topology)

    assert [line for line in words if line.startswith("declared")] == [
        f"declared queue {topology.queue} (quorum, durable)"
    ]
    assert await depths(amqp_url, topology) == {**dict.fromkeys(topology.send_queues.values(), 0), topology.dlq: 1}


async def test_a_queue_with_different_arguments_is_refused_with_the_difference(
    amqp_url: str, topology: Topology, rabbit: Rabbit
) -> None:
    other = replace(topology, dlq=f"{topology.dlq}.2")

    for check in (declare, verify):
        with pytest.raises(TopologyError) as refusal:
            await check(amqp_url, replace(topology, queue_type="classic"))
        assert topology.dlq in refusal.value.message
        assert "x-queue-type is 'quorum', we need 'classic'" in refusal.value.message
        assert "DISPATCHER_DLQ" in (refusal.value.remedy or "")

    words = rf"dead-letter-routing-key is '{topology.dlq}', we need '{other.dlq}'.*DISPATCHER_QUEUE"
    with pytest.raises(TopologyError, match=words):
        await declare(amqp_url, other)
    await rabbit.delete_queue(other.dlq)


async def test_other_arguments_and_an_exchange_of_another_type_are_refused(
    amqp_url: str, undeclared: Topology, rabbit: Rabbit
) -> None:
    with pytest.raises(TopologyError, match=r"exchange amq\.fanout.*: type is 'fanout', we need 'direct'"):
        await declare(amqp_url, replace(undeclared, exchange="amq.fanout"))

    await rabbit.delete_queue(undeclared.queue)
    await rabbit.declare_queue(undeclared.queue, **{"x-queue-type": "quorum"})
    with pytest.raises(TopologyError, match=f"queue {undeclared.queue}, with different arguments: x-.* is not set"):
        await declare(amqp_url, undeclared)


async def test_a_missing_object_is_named_with_the_remedy(amqp_url: str, topology: Topology, rabbit: Rabbit) -> None:
    for missing in (topology.send_queues["bulk"], topology.dlq):
        await rabbit.delete_queue(missing)
        for check in (verify, depths):
            with pytest.raises(TopologyError, match=f'no queue "{missing}". Run `dispatcher init`'):
                await check(amqp_url, topology)
        await declare(amqp_url, topology)
    await rabbit.delete_queue(topology.dlq)

    await rabbit.delete_exchange(topology.exchange)
    with pytest.raises(TopologyError, match=f'no exchange "{topology.exchange}". Run `dispatcher init`'):
        await verify(amqp_url, topology)


async def test_verify_creates_nothing(amqp_url: str, undeclared: Topology) -> None:
    for _ in range(2):
        with pytest.raises(TopologyError, match="no exchange"):
            await verify(amqp_url, undeclared)


async def test_depths_count_ready_messages(amqp_url: str, topology: Topology, rabbit: Rabbit) -> None:
    for _ in range(3):
        await rabbit.publish(topology.queue, b"one")

    found = await depths(amqp_url, topology)
    assert found == {**dict.fromkeys(topology.queues, 0), topology.queue: 3}


def test_an_unknown_form_of_refusal_is_passed_on() -> None:
    assert difference("PRECONDITION_FAILED - something new") == "PRECONDITION_FAILED - something new"


# Each recommended RabbitMQ user has exactly the permissions for its work.
PASSWORD = "only-für-this-test"


class Account:
    """A user with the permissions of one role, on the real RabbitMQ."""

    def __init__(self, servers: Servers, operator: Operator, topology: Topology, role: str) -> None:
        (user,) = [user for user in users_of(topology) if user.role == role]
        self.name = f"test-{role}-{secrets.token_hex(4)}"
        self._operator = operator
        operator.set_permissions(
            self.name, PASSWORD, tags=user.tags, configure=user.configure, write=user.write, read=user.read
        )
        self.amqp_url = self._as_user(servers.amqp_url)
        self.management_url = self._as_user(servers.management_url)

    def _as_user(self, url: str) -> str:
        parts = urlsplit(url)
        return urlunsplit(parts._replace(netloc=f"{self.name}:{quote(PASSWORD)}@{parts.netloc.rpartition('@')[2]}"))

    def delete(self) -> None:
        self._operator.delete_user(self.name)

    async def publish(self, exchange: str, key: str, body: bytes = b"{}") -> None:
        """Publish and wait for the confirm; raises ChannelClosed if RabbitMQ refuses the user."""
        async with await open_connection(self.amqp_url, name="test") as connection:
            channel = await connection.open_channel()
            confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            await channel.call(channel.raw.confirm_delivery, ack_nack_callback=lambda _: confirmed.set_result(None))
            channel.raw.basic_publish(exchange, key, body, BasicProperties())
            await channel.wait(confirmed, "basic.publish")

    async def bind(self, topology: Topology, queue: str) -> None:
        """Bind a queue like a relay; raises ChannelClosed if RabbitMQ refuses the user."""
        publisher = Publisher(self.amqp_url, topology.exchange, name="test")
        try:
            await publisher.bind(queue)
        finally:
            await publisher.close()

    async def consume_one(self, queue: str, *, reject: bool = False) -> None:
        """Consume a message like a worker; raises ChannelClosed if RabbitMQ refuses the user."""
        async with await open_connection(self.amqp_url, name="test") as connection:
            channel = await connection.open_channel()
            taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()

            def on_message(_channel: Any, method: Any, _properties: Any, _body: bytes) -> None:
                if not taken.done():
                    taken.set_result(method.delivery_tag)

            channel.raw.basic_consume(queue, on_message)
            tag = await channel.wait(taken, "basic.consume")
            settle = channel.raw.basic_reject if reject else channel.raw.basic_ack
            settle(tag, **({"requeue": False} if reject else {}))


@pytest.fixture
def accounts(servers: Servers, operator: Operator, topology_names: Topology) -> Iterator[dict[str, Account]]:
    """Creates one RabbitMQ user per role, and deletes the users after the test."""
    made = {user.role: Account(servers, operator, topology_names, user.role) for user in users_of(topology_names)}
    yield made
    for account in made.values():
        account.delete()


@contextmanager
def refused() -> Iterator[None]:
    """Asserts that RabbitMQ refuses the block's action, because the user lacks a permission."""
    with pytest.raises(ChannelClosed) as fault:
        yield
    assert fault.value.code == ACCESS_REFUSED


def http_status(url: str, method: str, path: str, fields: object = None) -> int:
    """The HTTP status of the management API's response to this user."""
    parts = urlsplit(url)
    credentials = base64.b64encode(f"{parts.username}:{unquote(parts.password or '')}".encode()).decode()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        body = None if fields is None else json.dumps(fields)
        connection.request(method, path, body=body, headers={"Authorization": f"Basic {credentials}"})
        return connection.getresponse().status
    finally:
        connection.close()


async def test_a_producer_and_a_worker_cannot_declare_and_are_told_so(
    accounts: dict[str, Account], topology: Topology
) -> None:
    for role in ("producer", "worker"):
        with pytest.raises(TopologyError, match="does not allow this user to declare exchange"):
            await declare(accounts[role].amqp_url, topology)


async def test_a_worker_may_publish_consume_reject_and_bind_and_nothing_else(
    accounts: dict[str, Account], topology: Topology, amqp_url: str
) -> None:
    worker = accounts["worker"]
    await verify(worker.amqp_url, topology)
    for queue in topology.send_queues.values():
        await worker.publish(topology.exchange, queue)
        await worker.consume_one(queue)
    await worker.publish(topology.exchange, topology.queue)
    await worker.consume_one(topology.queue, reject=True)

    async def is_dead_lettered() -> bool:
        return await depths(worker.amqp_url, topology) == {**dict.fromkeys(topology.queues, 0), topology.dlq: 1}

    await until_answer(is_dead_lettered)
    for queue in topology.queues:
        await worker.bind(topology, queue)
    with refused():
        await worker.bind(replace(topology, exchange="amq.direct"), topology.queue)
    for exchange in ("", "amq.direct"):
        with refused():
            await worker.publish(exchange, topology.dlq)
    async with await open_connection(worker.amqp_url, name="test") as connection:
        for queue in (f"{topology.queue}.x", topology.queue):
            with refused():
                await Rabbit(connection).declare_queue(queue)
            with refused():
                await Rabbit(connection).delete_queue(queue)
    assert await depths(amqp_url, topology) == {**dict.fromkeys(topology.queues, 0), topology.dlq: 1}
    await worker.consume_one(topology.dlq)  # its monitor removes stale dead letters


async def test_a_producer_may_publish_and_nothing_else(accounts: dict[str, Account], topology: Topology) -> None:
    producer = accounts["producer"]

    await producer.publish(topology.exchange, topology.queue)

    with refused():
        await producer.bind(topology, topology.queue)
    with refused():
        await producer.consume_one(topology.queue)
    with refused():
        await producer.publish("", topology.queue)
    async with await open_connection(producer.amqp_url, name="test") as connection:
        with refused():
            await Rabbit(connection).declare_queue(f"{topology.queue}.x")


async def test_an_operator_may_create_and_read_our_queues_and_no_others(
    accounts: dict[str, Account], undeclared: Topology
) -> None:
    operator = accounts["operator"]
    await declare(operator.amqp_url, undeclared)
    await operator.publish(undeclared.exchange, undeclared.dlq)

    await operator.consume_one(undeclared.dlq)

    async with await open_connection(operator.amqp_url, name="test") as connection:
        for name in (f"{undeclared.dlq}.x", f"x.{undeclared.dlq}", undeclared.dlq.replace(".", "-")):
            with refused():
                await Rabbit(connection).declare_queue(name)


async def test_a_probe_may_only_read_reports(accounts: dict[str, Account], topology: Topology) -> None:
    probe = accounts["probe"]
    management = Management(probe.management_url, timeout_seconds=DEADLINE_SECONDS)
    assert await management.version()
    assert await find_faults(management, topology) == []
    assert await management.queue(topology.dlq) is not None

    dlq = f"/api/queues/%2F/{quote(topology.dlq, safe='')}"
    taking = {"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"}
    assert http_status(probe.management_url, "DELETE", dlq) in (401, 403)
    assert http_status(probe.management_url, "DELETE", f"{dlq}/contents") in (400, 401, 403)
    assert http_status(probe.management_url, "POST", f"{dlq}/get", taking) in (400, 401, 403)
    assert http_status(probe.management_url, "PUT", "/api/users/x", {"password": "x", "tags": ""}) in (401, 403)
    with refused():
        await probe.consume_one(topology.dlq)
    for exchange in ("", topology.exchange):
        with refused():
            await probe.publish(exchange, topology.dlq)


async def test_the_management_api_refuses_users_without_a_tag(accounts: dict[str, Account], topology: Topology) -> None:
    for role in ("producer", "worker", "operator"):
        assert http_status(accounts[role].management_url, "GET", "/api/queues") == 401
