"""Publishes messages, and reports which messages RabbitMQ confirmed and routed to a queue.

A confirm alone does not prove routing: a message that matches no queue is returned first and then confirmed. So every
message is persistent and `mandatory`, and the publisher checks both answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from pika import exceptions, spec

from dispatcher.broker.connection import Channel, Connection, open_connection, parameters, resolve
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.topology import FoundQueue, bind, find
from dispatcher.errors import BrokerUnavailable

BATCH_SECONDS: Final = 15.0
REFUSED_SECONDS: Final = 1.0
"""If a queue refuses every message of a channel for this time, the publisher opens a new connection.

The election of a new leader of the queue takes less time. But if a channel publishes its first message during an
election, RabbitMQ keeps sending the channel's messages to the old leader, and refuses them until the old leader's node
is up again (seen with RabbitMQ 3.10.8; rabbitmq-server#9241)."""
WINDOW: Final = 1000
"""The most unconfirmed messages. This limits our memory while RabbitMQ blocks publishers. A larger window is not
faster."""


class Publisher:
    """Publishes to one exchange. Connects on first use, and again after the connection was lost.

    Several tasks may publish at the same time; their messages use the same connection and window. A publisher belongs
    to the event loop on which it first publishes.
    """

    def __init__(
        self,
        amqp_url: str,
        exchange: str,
        *,
        name: str,
        ca_file: Path | None = None,
        batch_seconds: float = BATCH_SECONDS,
        window: int = WINDOW,
    ) -> None:
        """Does not connect yet. Raises ConfigurationError if the URL is invalid."""
        parameters(amqp_url)
        self._amqp_url = amqp_url
        self._exchange = exchange
        self._name = name
        self._ca_file = ca_file
        self.batch_seconds = batch_seconds  # of one call of `publish`, including the connection
        self._window = window
        self._stream: _Stream | None = None
        self._connecting = asyncio.Lock()

    async def publish(self, messages: Sequence[Outgoing]) -> PublishResults:
        """Publishes messages. For each message, returns whether RabbitMQ confirmed it and routed it to a queue.

        False means that the message was refused or returned as unroutable, or that the result is unknown because the
        connection was lost or the timeout passed. Publish such a message again. The queue may then contain the message
        twice, which is harmless. Raises BrokerUnavailable only if no message was confirmed.
        """
        batch = _Batch(PublishResults([False] * len(messages)))
        fault: BrokerUnavailable | None = None
        try:
            async with asyncio.timeout(self.batch_seconds):
                stream = await self._connected()
                await stream.write(messages, batch, self._exchange)
                fault = await batch.done
                if messages and stream.is_refused(messages[0].queue, batch.published):
                    # Drop this connection; the next message opens a new one. Callers publish unconfirmed messages
                    # again.
                    if self._stream is stream:
                        self._stream = None
                    stream.connection.abort()
        except TimeoutError:
            fault = self._timeout_fault(batch)
        if fault is not None and not any(batch.published):
            raise fault
        return batch.published

    @property
    def is_open(self) -> bool:
        """Whether a connection is open. RabbitMQ may still block publishing over this connection."""
        return self._stream is not None and not self._stream.channel.closed.done()

    @property
    def is_blocked(self) -> bool:
        """Whether an alarm blocks the connection: RabbitMQ blocks it at its first message during the alarm."""
        return self._stream is not None and self._stream.connection.is_blocked

    @property
    def has_unanswered(self) -> bool:
        """Whether RabbitMQ has not answered a message, even if its call of `publish` has timed out."""
        return self._stream is not None and bool(self._stream.unanswered)

    async def open(self) -> None:
        """Connects, unless a connection is open."""
        await self._connected()

    async def find(self, queue: str) -> FoundQueue:
        """The current counts of a queue."""
        try:
            async with asyncio.timeout(self.batch_seconds):
                stream = await self._connected()
                await stream.connection.unblocked()  # RabbitMQ does not read calls from a blocked connection
                return await find(stream.connection, queue)
        except TimeoutError:
            words = f"RabbitMQ did not answer within {self.batch_seconds:g} s."
            raise _blocked_fault() if self.is_blocked else BrokerUnavailable(words) from None

    async def bind(self, queue: str) -> None:
        """Binds a queue to the exchange. Without this binding, RabbitMQ returns all messages."""
        await bind((await self._connected()).connection, self._exchange, queue)

    async def close(self) -> None:
        """Closes the connection if one is open. A later `publish` opens a new connection."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.connection.close()

    async def _connected(self) -> _Stream:
        async with self._connecting:
            if self._stream is None or not self.is_open:
                await self.close()
                connection = await open_connection(self._amqp_url, name=self._name, ca_file=self._ca_file)
                try:
                    channel = await connection.open_channel()
                    stream = _Stream(connection, channel, self._window)
                    await channel.call(channel.raw.confirm_delivery, ack_nack_callback=stream.on_answer)
                except BaseException:
                    connection.abort()
                    raise
                self._stream = stream
            return self._stream

    def _timeout_fault(self, batch: _Batch) -> BrokerUnavailable:
        stream = self._stream
        within = f"within {self.batch_seconds:g} s"
        if stream is None:
            return BrokerUnavailable(f"RabbitMQ cannot be reached {within}.")
        if stream.connection.is_blocked:
            # Keep the blocked connection. RabbitMQ would also accept a new connection, but would then have to buffer up
            # to `window` more unconfirmed messages.
            return _blocked_fault()
        stream.connection.abort()
        unanswered = len(batch.published) - batch.answered
        return BrokerUnavailable(f"RabbitMQ did not confirm {unanswered} of {len(batch.published)} messages {within}.")


def _blocked_fault() -> BrokerUnavailable:
    return BrokerUnavailable(
        "RabbitMQ blocks publishers: it is short of memory or disk space.",
        remedy="See the alarm in RabbitMQ's log or on its management page. No email is lost.",
    )


class PublishResults(list[bool]):
    """For each message, in order, whether it was published."""

    returned = 0  # messages without a bound queue; a queue refused the others, or the connection was lost


@dataclass(slots=True)
class _Batch:
    """One call of `publish`. `done`: None when every message is answered; the error if no more answers can arrive."""

    published: PublishResults
    answered: int = 0
    done: asyncio.Future[BrokerUnavailable | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def answer(self, index: int, *, published: bool) -> None:
        self.published[index] = published
        self.answered += 1
        if self.answered == len(self.published):
            resolve(self.done, None)


class _Stream:
    """A channel in confirm mode, with its unconfirmed messages, which RabbitMQ and this class number from 1."""

    def __init__(self, connection: Connection, channel: Channel, window: int) -> None:
        self.connection = connection
        self.channel = channel
        self._window = window
        self._written = 0
        self.unanswered: dict[int, tuple[_Batch, int, tuple[str, str]]] = {}
        self._returned: Counter[tuple[str, str]] = Counter()
        self._refused_since: dict[str, float] = {}
        self._room = asyncio.Event()
        channel.raw.add_on_return_callback(self._on_return)
        channel.closed.add_done_callback(self._on_closed)

    async def write(self, messages: Sequence[Outgoing], batch: _Batch, exchange: str) -> None:
        """Writes all messages as soon as the window and RabbitMQ allow it. `batch.done` reports the result."""
        if not messages:
            resolve(batch.done, None)
        await self.connection.unblocked()
        number, most = self.channel.raw.channel_number, self.channel.most_body_octets
        for index, message in enumerate(messages):
            while len(self.unanswered) >= self._window and not self.channel.closed.done():
                self._room.clear()
                await self._room.wait()
                await self.connection.unblocked()
            try:
                self.channel.write(message.frames(number, exchange, most))
            except exceptions.AMQPError as error:  # the channel is closing or closed
                resolve(batch.done, self.channel.fault(error))
                return
            self._written += 1
            self.unanswered[self._written] = batch, index, (message.queue, message.message_id)

    def is_refused(self, queue: str, answers: PublishResults) -> bool:
        """Notes the answers to a `publish`. Returns whether the queue has refused all messages for REFUSED_SECONDS."""
        if any(answers) or answers.returned:
            self._refused_since.pop(queue, None)
            return False
        now = asyncio.get_running_loop().time()
        return now - self._refused_since.setdefault(queue, now) >= REFUSED_SECONDS

    def _on_return(self, _channel: Any, method: Any, properties: Any, _body: bytes) -> None:
        self._returned[method.routing_key, properties.message_id] += 1

    def on_answer(self, answer: Any) -> None:
        """Handles RabbitMQ's answer, which confirms or refuses one message, or all messages up to a number."""
        method = answer.method
        confirmed = isinstance(method, spec.Basic.Ack)
        if method.multiple:
            # The numbers of the unanswered messages ascend, but they have gaps, because a quorum queue confirms in any
            # order. So take the numbers that exist.
            numbers = list(takewhile(lambda number: number <= method.delivery_tag, self.unanswered))
        else:
            numbers = [method.delivery_tag]
        for number in numbers:
            batch, index, name = self.unanswered.pop(number)
            returned = self._returned[name] > 0 if self._returned else False
            if returned:
                self._returned -= Counter((name,))
                batch.published.returned += 1
            batch.answer(index, published=confirmed and not returned)
        if len(self.unanswered) <= self._window // 2:
            self._room.set()

    def _on_closed(self, closed: asyncio.Future[BrokerUnavailable]) -> None:
        unanswered, self.unanswered = self.unanswered, {}
        for batch, _, _ in unanswered.values():
            resolve(batch.done, closed.result())
        self._room.set()
