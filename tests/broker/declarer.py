"""Creates the queues of tests like `dispatcher.broker.topology.declare`, but over one connection for many tests.

`declare` opens a connection and eight channels, and asks which objects exist, which takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from dispatcher.broker.topology import Topology


class Declarer:
    """A kept connection to RabbitMQ. If a test had the connection closed, the next call opens a new connection."""

    def __init__(self, amqp_url: str) -> None:
        self._parameters = pika.URLParameters(amqp_url)
        self._parameters.heartbeat = 0  # no code runs between two calls, so the connection could send no heartbeats
        self._channel: BlockingChannel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None and self._channel.connection.is_open:
            self._channel.connection.close()

    def declare(self, topology: Topology) -> None:
        """Creates the exchange, the queues and the bindings, as `dispatcher init` does."""

        def declare(channel: BlockingChannel) -> None:
            channel.exchange_declare(topology.exchange, "direct", durable=True)
            for queue in topology.queues:
                channel.queue_declare(queue, durable=True, arguments=topology.arguments(queue))
                channel.queue_bind(queue, topology.exchange, routing_key=queue)

        self._call(declare)

    def delete(self, topology: Topology) -> None:
        def delete(channel: BlockingChannel) -> None:
            for queue in topology.queues:
                channel.queue_delete(queue)
            channel.exchange_delete(topology.exchange)

        self._call(delete)

    def _call(self, operation: Callable[[BlockingChannel], None]) -> None:
        if self._channel is not None:
            try:
                return operation(self._channel)
            except AMQPError:
                self.__exit__()
        self._channel = pika.BlockingConnection(self._parameters).channel()
        return operation(self._channel)
