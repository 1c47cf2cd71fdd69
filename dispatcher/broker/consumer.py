"""Consuming: one connection, one channel, one prefetch window; connects again until it is told to stop.

A message that points to several emails is as many deliveries, its parts, each settled by itself; RabbitMQ hears of it
once none is open any more.

A delivery is the channel's that brought it. When the channel is lost RabbitMQ gives its unacked messages to others, so
its deliveries are void: whatever is done with them afterwards is dropped here. The same goes for a second ack. (Sending
either would make RabbitMQ close the channel with 406, and void the whole window.)
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

from pika import exceptions

from dispatcher.broker.connection import Channel, Connection, first_of, open_connection, parameters, resolve
from dispatcher.domain.backoff import Backoff
from dispatcher.errors import BrokerRefused, BrokerUnavailable
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

log = get_log()

FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 5.0
STEADY_SECONDS: Final = 30.0
"""A connection that lived so long starts the count of failures anew; one that is lost at once does not."""


class Delivery(NamedTuple):
    """A message that RabbitMQ has given us and waits to hear about. A tuple: there are tens of thousands a second.

    Attributes:
        tag: RabbitMQ's number for it on its channel, from 1.
        generation: Which of the consumer's channels brought it.
        redelivered: It was given to somebody before.
        part: Which of its emails it stands for, from 0.
    """

    tag: int
    generation: int
    body: bytes
    redelivered: bool
    part: int = 0


class Consumer:
    """Consumes one queue.

    `run` is a task; everything else is called from the same event loop, and returns at once unless it is a coroutine.

    Attributes:
        acked_count: Messages that were acked so far.
    """

    def __init__(
        self,
        amqp_url: str,
        queue: str,
        *,
        prefetch: int,
        on_tried: Callable[[], None] = lambda: None,
        on_refused: Callable[[BrokerRefused], None] = lambda _: None,
        name: str,
        ca_file: Path | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """Connects to nothing yet.

        Args:
            prefetch: How many unacked deliveries RabbitMQ lets us hold.
            on_tried: Told each time when RabbitMQ begins to give us messages, or was found away.
            on_refused: Told instead each time when RabbitMQ does not let us in. It is tried again all the same.
            name: What RabbitMQ's management shows for the connection.

        Raises:
            ConfigurationError: a URL cannot be used.
        """
        parameters(amqp_url)
        self._amqp_url = amqp_url
        self._queue = queue
        self._prefetch = prefetch
        self._on_delivery: Callable[[Delivery], None] = lambda _: None
        self._on_lost: Callable[[], None] = lambda: None
        self._on_tried = on_tried
        self._on_refused = on_refused
        self._name = name
        self._ca_file = ca_file
        self._backoff = backoff or Backoff(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
        self._generation = 1
        self._outstanding: dict[int, int] = {}  # by tag, ascending: a bit for each part that is open
        self._refused: dict[int, bool] = {}  # by tag, while other parts are open: whether the message is to come again
        self._session: _Session | None = None
        self._stopping = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._closing = False
        self.acked_count = 0

    @property
    def is_consuming(self) -> bool:
        """Whether RabbitMQ gives us messages."""
        return self._session is not None and self._session.is_consuming

    @property
    def outstanding(self) -> int:
        """How many messages RabbitMQ waits to hear about."""
        return len(self._outstanding)

    async def run(self, on_delivery: Callable[[Delivery], None], on_lost: Callable[[], None]) -> None:
        """Consumes until `cancel` or `close`, through every loss of RabbitMQ; a missing queue is waited for too.

        After `cancel` it returns once the connection is closed or lost.

        Args:
            on_delivery: Gets each message, in the loop; must be quick and not raise.
            on_lost: Called when the deliveries at hand have become void; not when we close.
        """
        self._on_delivery, self._on_lost = on_delivery, on_lost
        while await self._may_consume():
            began = time.monotonic()
            reason = await self._consume()
            if self._stopping.is_set():
                return
            if reason is None:
                continue
            if time.monotonic() - began > STEADY_SECONDS:
                self._backoff.worked()
            wait = self._backoff.next_wait(random.random)
            log.warning("broker.connection_lost", queue=self._queue, reason=reason, retry_in_seconds=round(wait, 1))
            await self._pause(wait)

    def split(self, delivery: Delivery, count: int) -> list[Delivery]:
        """The parts of a message that points to so many emails; the delivery itself is not settled any more."""
        if self._is_open(delivery):
            self._outstanding[delivery.tag] = (1 << count) - 1
        return [delivery._replace(part=part) for part in range(count)]

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Tells RabbitMQ what is done: with one frame as far as nothing before it is open, then one by one.

        A message of which a part was refused is sent back instead.
        """
        done = {each.tag for each in deliveries if self._closes(each)}
        if self._refused:
            for tag in self._refused.keys() & done:
                done.remove(tag)
                self._send_back(tag)
        prefix = list(takewhile(done.__contains__, self._outstanding))
        for tag in done:
            del self._outstanding[tag]
        acks = [(prefix[-1], True)] if prefix else []
        acks += [(tag, False) for tag in sorted(done.difference(prefix))]
        # Where the channel is closing, RabbitMQ gives the messages to somebody else, and `run` is about to notice.
        if acks and self._session is not None:
            with suppress(exceptions.AMQPError):
                self._session.channel.ack(acks)
                self.acked_count += len(done)

    def reject(self, delivery: Delivery) -> None:
        """Sends it to the DLQ: it can never be worked on."""
        self._refuse(delivery, requeue=False)

    def requeue(self, delivery: Delivery) -> None:
        """Gives it back, for anybody."""
        self._refuse(delivery, requeue=True)

    def pause(self) -> None:
        """Gives every delivery back, for other consumers, and stays away until `resume`; so told, in `on_lost`.

        A second call is harmless, and so is one after `cancel`: what is at hand then may still be acked.
        """
        self._resumed.clear()
        if self._session is not None and not self._stopping.is_set():
            self._session.give_up()

    def resume(self) -> None:
        """Ends a pause; harmless if there is none."""
        self._resumed.set()

    async def cancel(self) -> None:
        """Stops deliveries and connecting again; what is at hand may still be acked. A second call is harmless.

        When this returns `on_delivery` is called no more.
        """
        self._stopping.set()
        if self._session is not None:
            with suppress(BrokerUnavailable):  # lost meanwhile, which stops deliveries too
                await self._session.cancel()

    async def close(self) -> None:
        """Stops, closes the connection, and so gives back what was not acked; acks before it have reached RabbitMQ."""
        self._stopping.set()
        self._closing = True
        if self._session is not None:
            self._void()
            await self._session.connection.close()

    async def _may_consume(self) -> bool:
        """Waits out a pause; False once we stop."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait({stopping, resumed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            resumed.cancel()
        return not self._stopping.is_set()

    async def _consume(self) -> str | None:
        """One connection's life; returns why it ended, in words, or None if we were paused."""
        try:
            async with await open_connection(self._amqp_url, name=self._name, ca_file=self._ca_file) as connection:
                return await self._consume_on(connection)
        except BrokerRefused as fault:
            self._on_refused(fault)
            return str(fault)
        except BrokerUnavailable as fault:
            self._on_tried()
            return str(fault)

    async def _consume_on(self, connection: Connection) -> str | None:
        channel = await connection.open_channel()
        await channel.call(channel.raw.basic_qos, prefetch_count=self._prefetch)
        if self._stopping.is_set() or not self._resumed.is_set():
            return None
        session = self._session = _Session(connection, channel, self._name)
        try:
            await session.consume(self._queue, self._receiver())
            log.info("broker.connected", queue=self._queue)
            metrics.CONSUMING.set(1)
            self._on_tried()
            reason = await session.ended()
        finally:
            metrics.CONSUMING.set(0)
            self._session = None
            self._void()
        if not self._closing:
            self._on_lost()
        return reason

    def _receiver(self) -> Callable[[Any, Any, Any, bytes], None]:
        """What pika calls per delivery: as short as it can be."""
        generation = self._generation
        outstanding = self._outstanding
        on_delivery = self._on_delivery

        def receive(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            if generation == self._generation:
                tag = method.delivery_tag
                outstanding[tag] = 1
                on_delivery(Delivery(tag, generation, body, method.redelivered))

        return receive

    def _is_open(self, delivery: Delivery) -> bool:
        """Whether RabbitMQ waits to hear of it."""
        if delivery.generation != self._generation:
            return False
        return bool(self._outstanding.get(delivery.tag, 0) >> delivery.part & 1)

    def _closes(self, delivery: Delivery) -> bool:
        """Settles it; whether that was the last open part of its message."""
        parts, part = self._outstanding.get(delivery.tag, 0), 1 << delivery.part
        if delivery.generation != self._generation or not parts & part:
            return False
        self._outstanding[delivery.tag] = parts ^ part
        return parts == part

    def _refuse(self, delivery: Delivery, *, requeue: bool) -> None:
        """Sends its message back, or to the DLQ, when its other parts are done.

        Where it comes again for one of them, they are found done; a part that can never be worked on is refused again.
        """
        if self._is_open(delivery):
            self._refused[delivery.tag] = requeue or self._refused.get(delivery.tag, False)
            self.ack([delivery])

    def _send_back(self, tag: int) -> None:
        requeue = self._refused.pop(tag)
        del self._outstanding[tag]
        if self._session is not None:
            with suppress(exceptions.AMQPError):  # see `ack`
                self._session.channel.raw.basic_nack(delivery_tag=tag, requeue=requeue)

    def _void(self) -> None:
        """Whatever was delivered until now is nobody's business any more."""
        self._generation += 1
        self._outstanding.clear()
        self._refused.clear()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


class _Session:
    """A channel that consumes.

    Attributes:
        is_consuming: RabbitMQ has agreed to it, and neither side has cancelled since.
    """

    def __init__(self, connection: Connection, channel: Channel, consumer_tag: str) -> None:
        self.connection = connection
        self.channel = channel
        self.is_consuming = False
        self._consumer_tag = consumer_tag
        self._given_up = False
        self._cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        channel.raw.add_on_cancel_callback(lambda _: resolve(self._cancelled, None))

    async def consume(self, queue: str, receive: Callable[[Any, Any, Any, bytes], None]) -> None:
        """Begins; raises ChannelClosed where there is no such queue."""
        consume = self.channel.raw.basic_consume
        await self.channel.call(consume, queue=queue, on_message_callback=receive, consumer_tag=self._consumer_tag)
        self.is_consuming = not self._given_up

    async def cancel(self) -> None:
        """Stops deliveries; waits until RabbitMQ has agreed."""
        self.is_consuming = False
        if self._consumer_tag in self.channel.raw.consumer_tags:
            await self.channel.call(self.channel.raw.basic_cancel, consumer_tag=self._consumer_tag)

    def give_up(self) -> None:
        """Wants no more messages, from now on."""
        self._given_up = True
        self.is_consuming = False
        resolve(self._cancelled, None)

    async def ended(self) -> str | None:
        """Waits until RabbitMQ gives no more messages; returns why, in words, or None if we gave up."""
        await first_of(self._cancelled, self.channel.closed)
        if self._given_up:
            return None
        if self.channel.closed.done():
            return str(self.channel.closed.result())
        return "RabbitMQ cancelled the consumer: the queue was deleted, or its node is gone."
