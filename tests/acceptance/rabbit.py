"""A RabbitMQ client that is independent of the dispatcher, and figures of the management page."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingChannel

from dispatcher.broker.connection import TRUSTED_SECONDS
from tests.waiting import wait_until


def _find(connection: pika.BlockingConnection, queue: str) -> Any:
    channel = connection.channel()
    found = channel.queue_declare(queue, passive=True).method
    channel.close()
    return found


@dataclass(frozen=True, slots=True)
class QueueMessage:
    body: bytes
    properties: Any

    @property
    def was_rejected(self) -> bool:
        """Whether RabbitMQ dead-lettered the message because a consumer rejected it."""
        return "x-death" in (self.properties.headers or {})


class Rabbit:
    """A blocking client without the dispatcher's code. Each call opens a connection to the first of the URLs that
    answers. With `keeps_connection`, calls that only ask RabbitMQ use a single connection until `close`, because tests
    ask every few milliseconds."""

    def __init__(self, amqp_url: str, management_url: str, *, keeps_connection: bool = False) -> None:
        self._keeps_connection = keeps_connection
        self._kept: pika.BlockingConnection | None = None
        self._amqp_urls = [pika.URLParameters(url) for url in amqp_url.split(",")]
        self._managements = [urlsplit(url) for url in management_url.split(",")]

    def publish(self, queue: str, *bodies: bytes, properties: pika.BasicProperties | None = None) -> None:
        """Publish any bytes to a queue. The messages are on the queue when this method returns."""
        with self._channel() as channel:
            channel.confirm_delivery()
            for body in bodies:
                channel.basic_publish("", queue, body, properties or pika.BasicProperties(), mandatory=True)

    def read_all(self, queue: str) -> list[QueueMessage]:
        """All ready messages. The messages stay on the queue, and are ready again when this method returns."""
        found = []
        with self._channel() as channel:
            while True:
                method, properties, body = channel.basic_get(queue)
                if method is None:
                    break
                found.append(QueueMessage(body, properties))
            # RabbitMQ requeues the unacked messages a moment after the channel is closed.
        wait_until(lambda: self.waiting(queue) >= len(found))
        return found

    def waiting(self, queue: str) -> int:
        """The number of ready messages; unacked messages do not count."""
        while True:
            asked_at = time.monotonic()
            count = int(self._find(queue).message_count)
            if count or time.monotonic() - asked_at < TRUSTED_SECONDS:  # see `Channel.find_queue`
                return count

    def unsettled(self, queue: str) -> int:
        """The number of ready and unacked messages; RabbitMQ's report lags by some seconds."""
        vhost = self._amqp_urls[0].virtual_host
        found = json.loads(self._request("GET", f"/api/queues/{quote(vhost, safe='')}/{quote(queue, safe='')}"))
        return int(found.get("messages", 1))

    def consumers(self, queue: str) -> int:
        return int(self._find(queue).consumer_count)

    def purge(self, queue: str) -> None:
        with self._channel() as channel:
            channel.queue_purge(queue)

    def delete(self, queue: str) -> None:
        with self._channel() as channel:
            channel.queue_delete(queue)

    def close_connections(self, *names: str, chosen: Callable[[], bool] = lambda: True) -> int:
        """Close the connections that clients have given these names by force if `chosen` returns true; return their
        number."""
        closed = 0
        for connection in json.loads(self._request("GET", "/api/connections")):
            if connection.get("client_properties", {}).get("connection_name", "").startswith(names) and chosen():
                self._request("DELETE", f"/api/connections/{quote(connection['name'], safe='')}")
                closed += 1
        return closed

    def close(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            with suppress(pika.exceptions.AMQPError):
                kept.close()

    def _find(self, queue: str) -> Any:
        """RabbitMQ's report about the queue. If the kept connection was cut, this method opens a new one."""
        if not self._keeps_connection:
            with self._channel() as channel:
                return channel.queue_declare(queue, passive=True).method
        if self._kept is not None:
            with suppress(pika.exceptions.AMQPConnectionError):
                return _find(self._kept, queue)
        self._kept = pika.BlockingConnection(self._amqp_urls)
        return _find(self._kept, queue)

    @contextmanager
    def _channel(self) -> Iterator[BlockingChannel]:
        connection = pika.BlockingConnection(self._amqp_urls)
        try:
            yield connection.channel()
        finally:
            connection.close()

    def _request(self, method: str, path: str) -> bytes:
        *others, last = self._managements
        for management in others:
            with suppress(OSError):
                return self._request_of(management, method, path)
        return self._request_of(last, method, path)

    def _request_of(self, management: SplitResult, method: str, path: str) -> bytes:
        login = f"{unquote(management.username or '')}:{unquote(management.password or '')}"
        headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
        connection = HTTPConnection(management.hostname or "", management.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            reply = connection.getresponse()
            body = reply.read()
            # Status 404 means that the connection is already closed.
            assert reply.status < 300 or (method, reply.status) == ("DELETE", 404), (reply.status, body)
            return body
        finally:
            connection.close()
