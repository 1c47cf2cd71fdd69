"""Operations on RabbitMQ without the dispatcher's code, and `eventually`, which waits for a condition."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from pika.spec import BasicProperties

from dispatcher.broker.connection import Connection
from dispatcher.broker.pointer import TRACEPARENT, Pointer, decode
from tests.waiting import wait_until

DEADLINE_SECONDS = 20.0


async def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Wait until the condition is true, and return its value."""
    give_up_at = asyncio.get_running_loop().time() + DEADLINE_SECONDS
    while not (value := condition()):
        assert asyncio.get_running_loop().time() < give_up_at, f"timed out, waiting for {what}"
        await asyncio.sleep(0.01)
    return value


@dataclass(frozen=True)
class Taken:
    """A message that a test took off a queue."""

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
    """A RabbitMQ client without the dispatcher's code."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def publish(self, queue: str, body: bytes, properties: BasicProperties | None = None) -> None:
        """Publish any bytes to a queue. The message is on the queue when this method returns."""
        channel = await self._connection.open_channel()
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        raw = channel.raw
        await channel.call(raw.confirm_delivery, ack_nack_callback=lambda _: confirmed.set_result(None))
        raw.basic_publish("", queue, body, properties or BasicProperties())
        await channel.wait(confirmed, "basic.publish")
        raw.close()

    async def take(self, queue: str) -> Taken | None:
        """Take and ack the queue's next message; None if the queue is empty."""
        channel = await self._connection.open_channel()
        taken: asyncio.Future[Taken | None] = asyncio.get_running_loop().create_future()

        def on_message(_channel: Any, method: Any, properties: Any, body: bytes) -> None:
            taken.set_result(Taken(body, properties, method.redelivered))

        channel.raw.add_callback(lambda _: taken.set_result(None), ["Basic.GetEmpty"])
        channel.raw.basic_get(queue, on_message, auto_ack=True)
        message = await channel.wait(taken, "basic.get")
        channel.raw.close()
        assert message is None or isinstance(message, Taken)
        return message

    async def take_all_within(self, queue: str, count: int) -> list[Taken]:
        """Take and ack the next `count` messages of a queue that may have more. Waits for each message."""
        messages: list[Taken] = []
        latest_at = asyncio.get_running_loop().time()
        while len(messages) < count and asyncio.get_running_loop().time() < latest_at + DEADLINE_SECONDS:
            if message := await self.take(queue):
                messages.append(message)
                latest_at = asyncio.get_running_loop().time()
        assert len(messages) == count
        return messages

    async def take_all(self, queue: str, count: int) -> list[Taken]:
        """Take and ack exactly this number of messages of a queue. Waits for each message; fails if the queue has more
        messages."""
        messages: list[Taken] = []
        loop = asyncio.get_running_loop()
        latest_at = loop.time()
        while len(messages) < count and loop.time() < latest_at + DEADLINE_SECONDS:
            if message := await self.take(queue):
                messages.append(message)
                latest_at = loop.time()
        assert len(messages) == count
        assert await self.take(queue) is None
        return messages

    async def declare_queue(self, queue: str, **arguments: Any) -> None:
        """Declare a durable queue."""
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.queue_declare, queue=queue, durable=True, arguments=arguments)

    async def bind_queue(self, queue: str, exchange: str) -> None:
        """Bind a queue to an exchange, with the queue's name as routing key."""
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.queue_bind, queue=queue, exchange=exchange, routing_key=queue)

    async def unbind_queue(self, queue: str, exchange: str) -> None:
        """Remove the binding that `bind_queue` makes."""
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.queue_unbind, queue=queue, exchange=exchange, routing_key=queue)

    async def delete_queue(self, queue: str) -> None:
        """Delete a queue and its messages. Idempotent."""
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.queue_delete, queue=queue)

    async def delete_exchange(self, exchange: str) -> None:
        """Delete an exchange. Idempotent."""
        channel = await self._connection.open_channel()
        await channel.call(channel.raw.exchange_delete, exchange=exchange)


class Operator:
    """An administrator who uses the management API."""

    def __init__(self, management_url: str) -> None:
        self._parts = urlsplit(management_url)

    def close_connection(self, name: str) -> bool:
        """Close the connection with this name by force; False if RabbitMQ does not list the connection yet."""
        listed = list(self._connections(name))
        for connection in listed:
            self._request("DELETE", f"/api/connections/{quote(connection, safe='')}")
        return bool(listed)

    @contextmanager
    def policy(
        self,
        queue: str,
        definition: dict[str, Any],
        *,
        vhost: str = "/",
        kind: str = "policy",
        name: str | None = None,
        pattern: str | None = None,
        priority: int = 100,
    ) -> Iterator[None]:
        """Apply a policy, or an operator policy, to a queue for the duration of a block."""
        name = name or queue
        kinds = {"policy": "policies", "operator_policy": "operator-policies"}
        path = f"/api/{kinds[kind]}/{quote(vhost, safe='')}/{quote(name, safe='')}"
        pattern = pattern or f"^{re.escape(queue)}$"
        fields = {"pattern": pattern, "definition": definition, "apply-to": "queues", "priority": priority}
        self._request("PUT", path, fields)
        try:
            wait_until(lambda: self.report(queue, vhost).get(kind) == name)
            yield
        finally:
            self._request("DELETE", path)

    def report(self, queue: str, vhost: str = "/") -> dict[str, Any]:
        """RabbitMQ's report about a queue."""
        found: dict[str, Any] = json.loads(
            self._request("GET", f"/api/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}")
        )
        return found

    def set_permissions(self, user: str, password: str, *, tags: str = "", **permissions: str) -> None:
        """Create a user with exactly these permissions."""
        self._request("PUT", f"/api/users/{user}", {"password": password, "tags": tags})
        self._request("PUT", f"/api/permissions/%2F/{user}", {"configure": "", "write": "", "read": "", **permissions})

    def delete_user(self, user: str) -> None:
        """Delete a user and its permissions."""
        self._request("DELETE", f"/api/users/{user}")

    def _connections(self, name: str) -> Iterator[str]:
        for connection in json.loads(self._request("GET", "/api/connections")):
            if connection.get("client_properties", {}).get("connection_name") == name:
                yield connection["name"]

    def _request(self, method: str, path: str, fields: object = None) -> bytes:
        credentials = f"{unquote(self._parts.username or '')}:{unquote(self._parts.password or '')}"
        headers = {
            "Authorization": "Basic " + base64.b64encode(credentials.encode()).decode(),
            "Content-Type": "application/json",
        }
        connection = http.client.HTTPConnection(self._parts.hostname or "", self._parts.port, timeout=30)
        try:
            connection.request(method, path, body=None if fields is None else json.dumps(fields), headers=headers)
            reply = connection.getresponse()
            body = reply.read()
            assert reply.status < 300, (reply.status, body)
            return body
        finally:
            connection.close()
