"""Operations on RabbitMQ without the dispatcher's code."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from pika.spec import BasicProperties

from dispatcher.broker.connection import Channel, Connection
from dispatcher.broker.pointer import TRACEPARENT, Pointer, decode
from dispatcher.broker.topology import Topology
from tests.waiting import until_answer, wait_until


@dataclass(frozen=True)
class Taken:
    body: bytes
    properties: Any
    redelivered: bool

    @property
    def pointer(self) -> Pointer:
        """The decoded pointer, including the values from the message's properties."""
        (pointer,) = decode(self.body)
        headers = self.properties.headers or {}
        return pointer._replace(correlation_id=self.properties.correlation_id, traceparent=headers.get(TRACEPARENT))


class Rabbit:
    """A RabbitMQ client without the dispatcher's code. Not for several tasks at once that publish or take."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._publishing: Channel | None = None
        self._taking: Channel | None = None
        self._answer: asyncio.Future[Any]

    async def publish(
        self, queue: str, body: bytes, properties: BasicProperties | None = None, *, exchange: str = ""
    ) -> None:
        """Publish any bytes to a queue. The message is on the queue when this method returns."""
        channel, self._publishing = self._publishing, None  # a failed call closes the channel
        if channel is None:
            channel = await self._connection.open_channel()
            await channel.call(channel.raw.confirm_delivery, ack_nack_callback=self._note)
        self._answer = asyncio.get_running_loop().create_future()
        channel.raw.basic_publish(exchange, queue, body, properties or BasicProperties())
        await channel.wait(self._answer, "basic.publish")
        self._publishing = channel

    async def take(self, queue: str) -> Taken | None:
        """Take and ack the queue's next message; None if the queue is empty."""
        channel, self._taking = self._taking, None
        if channel is None:
            channel = await self._connection.open_channel()
            channel.raw.add_callback(self._note, ["Basic.GetEmpty"], one_shot=False)
        self._answer = asyncio.get_running_loop().create_future()
        channel.raw.basic_get(queue, lambda *found: self._note(found), auto_ack=True)
        found = await channel.wait(self._answer, "basic.get")
        self._taking = channel
        if not isinstance(found, tuple):
            return None
        _, method, properties, body = found
        return Taken(body, properties, method.redelivered)

    def _note(self, answer: object) -> None:
        self._answer.set_result(answer)

    async def take_all_within(self, queue: str, count: int) -> list[Taken]:
        """Take and ack the next `count` messages of a queue that may have more. Waits for each message."""
        messages: list[Taken] = []
        for _ in range(count):
            message = await until_answer(lambda: self.take(queue))
            assert message is not None
            messages.append(message)
        return messages

    async def take_all(self, queue: str, count: int) -> list[Taken]:
        """Take and ack exactly this number of messages of a queue. Waits for each message; fails if the queue has more
        messages."""
        messages = await self.take_all_within(queue, count)
        assert await self.take(queue) is None
        return messages

    async def declare_queue(self, queue: str, **arguments: Any) -> None:
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.queue_declare, queue=queue, durable=True, arguments=arguments)

    async def bind_queue(self, queue: str, exchange: str) -> None:
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.queue_bind, queue=queue, exchange=exchange, routing_key=queue)

    async def unbind_queue(self, queue: str, exchange: str) -> None:
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.queue_unbind, queue=queue, exchange=exchange, routing_key=queue)

    async def delete_queue(self, queue: str) -> None:
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.queue_delete, queue=queue)

    async def delete_exchange(self, exchange: str) -> None:
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.exchange_delete, exchange=exchange)


@dataclass
class BrokerStage:
    """The queues of a test. The stack ends what the test starts."""

    amqp_url: str
    topology: Topology
    rabbit: Rabbit
    stack: AsyncExitStack

    @property
    def queue(self) -> str:
        return self.topology.queue


class Operator:
    def __init__(self, management_url: str) -> None:
        self._parts = urlsplit(management_url)

    def close_connection(self, name: str) -> bool:
        """Close the connection with this name by force; False if RabbitMQ does not list the connection yet."""
        connections = json.loads(self._request("GET", "/api/connections"))
        listed = [one for one in connections if one.get("client_properties", {}).get("connection_name") == name]
        for connection in listed:
            self._request("DELETE", f"/api/connections/{quote(connection['name'], safe='')}")
        return bool(listed)

    @contextmanager
    def policy(self, queue: str, definition: dict[str, Any]) -> Iterator[None]:
        path = f"/api/policies/%2F/{quote(queue, safe='')}"
        fields = {"definition": definition, "apply-to": "queues", "priority": 100, "pattern": f"^{re.escape(queue)}$"}

        def is_applied() -> bool:
            report = json.loads(self._request("GET", f"/api/queues/%2F/{quote(queue, safe='')}"))
            return bool(report.get("policy") == queue)

        self._request("PUT", path, fields)
        try:
            wait_until(is_applied)
            yield
        finally:
            self._request("DELETE", path)

    def set_permissions(self, user: str, password: str, *, tags: str = "", **permissions: str) -> None:
        self._request("PUT", f"/api/users/{user}", {"password": password, "tags": tags})
        self._request("PUT", f"/api/permissions/%2F/{user}", {"configure": "", "write": "", "read": "", **permissions})

    def _request(self, method: str, path: str, fields: object = None) -> bytes:
        status, body = self.request(method, path, fields)
        assert status < 300, (status, body)
        return body

    def request(self, method: str, path: str, fields: object = None) -> tuple[int, bytes]:
        credentials = f"{unquote(self._parts.username or '')}:{unquote(self._parts.password or '')}"
        basic = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        headers = {"Authorization": basic, "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self._parts.hostname or "", self._parts.port, timeout=30)
        try:
            connection.request(method, path, body=None if fields is None else json.dumps(fields), headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()
