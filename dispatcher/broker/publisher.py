"""Publishing with proof: a message counts as published when RabbitMQ has confirmed it and has not given it back.

A confirm alone does not mean routed: a message that fits no queue comes back as a return, before its confirm. So every
message is persistent and `mandatory`, and both answers are awaited.
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
from dispatcher.errors import BrokerUnavailable

BATCH_SECONDS: Final = 15.0
REFUSED_SECONDS: Final = 1.0
"""After so long without a confirm, a channel on which a queue refuses everything is given up for another. An election
takes less. A channel that first publishes during one keeps asking the old leader, and refuses everything until that
leader's node is back (seen with RabbitMQ 3.10.8; rabbitmq-server#9241)."""
WINDOW: Final = 1000
"""Messages on the way at once. More does not go faster; this bounds what a blocked broker leaves in our memory."""


class Publisher:
    """Publishes to one exchange; connects when it is first needed, and again after a loss.

    Several tasks may publish at once: their messages share the connection and the window. Belongs to the event loop
    that it first publishes on.

    Attributes:
        batch_seconds: How long one call of `publish` may take, connecting included.
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
        """Connects to nothing yet.

        Args:
            name: What RabbitMQ's management shows for the connection.
            batch_seconds: See there.
            window: How many messages may be unconfirmed at once.

        Raises:
            ConfigurationError: the URL cannot be used.
        """
        parameters(amqp_url)
        self._amqp_url = amqp_url
        self._exchange = exchange
        self._name = name
        self._ca_file = ca_file
        self.batch_seconds = batch_seconds
        self._window = window
        self._stream: _Stream | None = None
        self._connecting = asyncio.Lock()

    async def publish(self, messages: Sequence[Outgoing]) -> Answers:
        """Which of the messages are published, in their order: confirmed by RabbitMQ and routed to a queue.

        False says that the message was refused or came back unroutable, or that nobody knows because the connection was
        lost or the time was up: publish it again. That may put it on the queue twice, which is harmless.

        Raises:
            BrokerUnavailable: none of them is known to be published, because RabbitMQ is away, blocks publishers, has
                no such exchange, or does not answer in time. Never raised where one is.
        """
        batch = _Batch(Answers([False] * len(messages)))
        fault: BrokerUnavailable | None = None
        try:
            async with asyncio.timeout(self.batch_seconds):
                stream = await self._connected()
                await stream.write(messages, batch, self._exchange)
                fault = await batch.done
                if messages and stream.is_refused(messages[0].queue, batch.published):
                    self._abandon(stream)
        except TimeoutError:
            fault = self._time_is_up(batch)
        if fault is not None and not any(batch.published):
            raise fault
        return batch.published

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to publish by; RabbitMQ may block it."""
        return self._stream is not None and not self._stream.channel.closed.done()

    async def open(self) -> None:
        """Connects, unless a connection is open.

        Raises:
            BrokerUnavailable: RabbitMQ is away.
        """
        await self._connected()

    async def close(self) -> None:
        """Closes the connection, if there is one; a later `publish` opens another."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.connection.close()

    async def _connected(self) -> _Stream:
        async with self._connecting:
            if self._stream is None or not self.is_open:
                await self.close()
                self._stream = await _open_stream(self._amqp_url, self._name, self._ca_file, self._window)
            return self._stream

    def _abandon(self, stream: _Stream) -> None:
        """Has the next message open another connection. What is on the way by this one is published again."""
        if self._stream is stream:
            self._stream = None
        stream.connection.abort()

    def _time_is_up(self, batch: _Batch) -> BrokerUnavailable:
        stream = self._stream
        within = f"within {self.batch_seconds:g} s"
        if stream is None:
            return BrokerUnavailable(f"RabbitMQ cannot be reached {within}.")
        if stream.connection.is_blocked:
            # The connection stays: a new one would be let in, and take another window of messages into its buffers.
            return BrokerUnavailable(
                "RabbitMQ blocks publishers: it is short of memory or disk space.",
                remedy="See its log or management page for the alarm; nothing is lost meanwhile.",
            )
        stream.connection.abort()
        unanswered = len(batch.published) - batch.answered
        return BrokerUnavailable(f"RabbitMQ did not confirm {unanswered} of {len(batch.published)} messages {within}.")


class Answers(list[bool]):
    """Which of some messages are published, in their order.

    Attributes:
        returned: How many came back because no queue is bound for them. The other unpublished ones were refused (by a
            queue without a quorum, or a full one), or the connection was lost before RabbitMQ answered.
    """

    returned = 0


@dataclass(slots=True)
class _Batch:
    """One call of `publish`.

    Attributes:
        done: What became of it as a whole, once every message is answered (None) or none can be any more.
    """

    published: Answers
    answered: int = 0
    done: asyncio.Future[BrokerUnavailable | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def answer(self, index: int, *, published: bool) -> None:
        self.published[index] = published
        self.answered += 1
        if self.answered == len(self.published):
            resolve(self.done, None)


async def _open_stream(amqp_url: str, name: str, ca_file: Path | None, window: int) -> _Stream:
    connection = await open_connection(amqp_url, name=name, ca_file=ca_file)
    try:
        channel = await connection.open_channel()
        stream = _Stream(connection, channel, window)
        await channel.call(channel.raw.confirm_delivery, ack_nack_callback=stream.on_answer)
    except BaseException:
        connection.abort()
        raise
    return stream


class _Stream:
    """A channel in confirm mode, and what is on the way there. RabbitMQ numbers what it gets from 1, and so do we."""

    def __init__(self, connection: Connection, channel: Channel, window: int) -> None:
        self.connection = connection
        self.channel = channel
        self._window = window
        self._written = 0
        self._unanswered: dict[int, tuple[_Batch, int, tuple[str, str]]] = {}
        self._returned: Counter[tuple[str, str]] = Counter()
        self._refused_since: dict[str, float] = {}
        self._room = asyncio.Event()
        channel.raw.add_on_return_callback(self._on_return)
        channel.closed.add_done_callback(self._on_closed)

    async def write(self, messages: Sequence[Outgoing], batch: _Batch, exchange: str) -> None:
        """Writes all messages, as room and RabbitMQ allow; `batch.done` tells the rest."""
        if not messages:
            resolve(batch.done, None)
        await self.connection.unblocked()
        number, most = self.channel.raw.channel_number, self.channel.most_body_octets
        for index, message in enumerate(messages):
            while len(self._unanswered) >= self._window and not self.channel.closed.done():
                self._room.clear()
                await self._room.wait()
                await self.connection.unblocked()
            try:
                self.channel.write(message.frames(number, exchange, most))
            except exceptions.AMQPError as error:  # it is closing, or closed
                resolve(batch.done, self.channel.fault(error))
                return
            self._written += 1
            self._unanswered[self._written] = batch, index, (message.queue, message.message_id)

    def is_refused(self, queue: str, answers: Answers) -> bool:
        """Whether the queue has refused everything for REFUSED_SECONDS, and refused these messages now."""
        if any(answers) or answers.returned:
            self._refused_since.pop(queue, None)
            return False
        now = asyncio.get_running_loop().time()
        return now - self._refused_since.setdefault(queue, now) >= REFUSED_SECONDS

    def _on_return(self, _channel: Any, method: Any, properties: Any, _body: bytes) -> None:
        self._returned[method.routing_key, properties.message_id] += 1

    def on_answer(self, answer: Any) -> None:
        """RabbitMQ confirms or refuses a message, or all up to one."""
        method = answer.method
        confirmed = isinstance(method, spec.Basic.Ack)
        if method.multiple:
            # The numbers ascend, but there are gaps: a quorum queue confirms in any order.
            numbers = list(takewhile(lambda number: number <= method.delivery_tag, self._unanswered))
        else:
            numbers = [method.delivery_tag]
        for number in numbers:
            self._settle(number, confirmed=confirmed)
        if len(self._unanswered) <= self._window // 2:
            self._room.set()

    def _settle(self, number: int, *, confirmed: bool) -> None:
        batch, index, name = self._unanswered.pop(number)
        returned = self._returned[name] > 0 if self._returned else False
        if returned:
            self._returned -= Counter((name,))
            batch.published.returned += 1
        batch.answer(index, published=confirmed and not returned)

    def _on_closed(self, closed: asyncio.Future[BrokerUnavailable]) -> None:
        unanswered, self._unanswered = self._unanswered, {}
        for batch, _, _ in unanswered.values():
            resolve(batch.done, closed.result())
        self._room.set()
