"""Each recommended RabbitMQ user has exactly the permissions for its work."""

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
from urllib.parse import quote, urlsplit, urlunsplit

import pytest
from pika.spec import BasicProperties

from dispatcher.broker.connection import open_connection
from dispatcher.broker.faults import ACCESS_REFUSED, ChannelClosed
from dispatcher.broker.inspection import find_faults
from dispatcher.broker.management import Management
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology, declare, depths, users_of, verify
from dispatcher.dev.servers import Servers
from tests.broker.rabbit import Operator, Rabbit
from tests.waiting import DEADLINE_SECONDS, until_answer

PASSWORD = "only-for-this-test"


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
        return urlunsplit(parts._replace(netloc=f"{self.name}:{PASSWORD}@{parts.netloc.rpartition('@')[2]}"))

    def delete(self) -> None:
        """Delete the user."""
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
    credentials = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        body = None if fields is None else json.dumps(fields)
        connection.request(method, path, body=body, headers={"Authorization": f"Basic {credentials}"})
        return connection.getresponse().status
    finally:
        connection.close()


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
