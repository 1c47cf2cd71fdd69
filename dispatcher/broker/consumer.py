"""Consumes the lanes' queues over one connection and one channel. Reconnects until it is stopped.

Each lane has a consumer and a prefetch window of its own on the channel. So the messages of one lane never delay the
messages of another lane. If a lane's queue does not exist, the other lanes are consumed, and this module looks for the
queue once per second. RabbitMQ 3.10 does not always report that a queue was deleted, so this module also checks the
queues that it consumes. After RabbitMQ has cancelled a consumer, this module waits before it looks for the queue.

A message that points to several emails is split into parts: one delivery for each email. The worker acks, rejects or
requeues each part separately. When this has happened to every part, this module acks, rejects or requeues the whole
message. Until then, the message has open parts.

A delivery belongs to the channel that delivered it. If the channel is lost, RabbitMQ redelivers the channel's unacked
messages to other consumers, so the channel's deliveries become void. This module never acks or rejects a void delivery,
and never acks or rejects a delivery twice. Otherwise, RabbitMQ would close the channel with error 406, and redeliver
all unacked messages.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

from pika import exceptions

from dispatcher.broker.connection import Channel, Connection, open_connection, parameters
from dispatcher.broker.faults import NOT_FOUND, ChannelClosed
from dispatcher.broker.topology import find
from dispatcher.domain.lanes import NORMAL
from dispatcher.domain.retry import Backoff
from dispatcher.errors import BrokerRefused, BrokerUnavailable, TopologyError
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

log = get_log()

FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 5.0
STEADY_SECONDS: Final = 30.0
"""Only a connection that lasted longer than this resets the backoff before a reconnect."""
LOOK_SECONDS: Final = 1.0
"""How often to look for a missing queue."""
CHECK_SECONDS: Final = 10.0
"""How often to check that the consumed queues still exist."""
CANCELLED_SECONDS: Final = 1.0
"""The shortest wait before this module looks for a queue whose consumer RabbitMQ has cancelled; the longest is twice as
long. RabbitMQ cancels the consumers before it has deleted their queue. A consumer that starts meanwhile makes RabbitMQ
4.0 keep the queue, but without its binding (seen with RabbitMQ 4.0.5)."""


class Delivery(NamedTuple):
    """A delivery that we must ack, reject or requeue. A tuple for speed: tens of thousands per second."""

    tag: int  # RabbitMQ's number for the delivery on its channel, from 1
    generation: int  # identifies the channel of the delivery
    body: bytes
    redelivered: bool
    part: int = 0  # the index of the delivery's email in the message, from 0
    lane: str = NORMAL


class Consumer:
    """Consumes the queues of all lanes. Start `run` as a task, and call the other methods from the same event loop."""

    def __init__(
        self,
        amqp_url: str,
        queues: Mapping[str, str],
        *,
        prefetch: int,
        on_attempt: Callable[[], None] = lambda: None,
        on_refused: Callable[[BrokerRefused], None] = lambda _: None,
        name: str,
        ca_file: Path | None = None,
        backoff: Backoff | None = None,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        """Does not connect yet. `on_attempt`: called whenever consuming starts, and whenever RabbitMQ cannot be
        reached. `on_refused`: called instead whenever RabbitMQ refuses the login; the consumer keeps trying."""
        parameters(amqp_url)
        self._amqp_url = amqp_url
        self._queues = dict(queues)
        self._paused_lanes: set[str] = set()
        self._missing_lanes: set[str] = set()
        self._cancelled_until: dict[str, float] = {}
        self._prefetch = prefetch
        self._on_delivery: Callable[[Delivery], None] = lambda _: None
        self._on_lost: Callable[[], None] = lambda: None
        self._on_attempt = on_attempt
        self._on_refused = on_refused
        self._name = name
        self._ca_file = ca_file
        self._backoff = backoff or Backoff(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS)
        self._check_seconds = check_seconds
        self._generation = 1
        # The open messages, in the order of their delivery tags. The value has one bit for each open part of a message.
        self._outstanding: dict[int, int] = {}
        # The open messages that have a rejected or requeued part, by delivery tag. The value: whether to requeue the
        # message.
        self._refused: dict[int, bool] = {}
        self._session: _Session | None = None
        self._lanes_lock = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._closing = False
        self.acked_count = 0

    @property
    def is_consuming(self) -> bool:
        return self._session is not None and bool(self._session.lanes) and not self._stopping.is_set()

    @property
    def outstanding(self) -> int:
        """The number of delivered messages that are not yet acked, rejected or requeued."""
        return len(self._outstanding)

    async def run(self, on_delivery: Callable[[Delivery], None], on_lost: Callable[[], None]) -> None:
        """Consumes until `cancel` or `close`. Reconnects if the connection is lost. After `cancel`, returns when the
        connection is closed or lost.

        `on_delivery` must be fast and must not raise. `on_lost`: called when the connection or channel has ended, so
        that earlier deliveries can no longer be acked; not called on `close`.
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
                self._backoff.reset()
            wait = self._backoff.next_wait(random.random)
            log.warning("broker.connection_lost", reason=reason, retry_in_seconds=round(wait, 1))
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stopping.wait()

    def split(self, delivery: Delivery, count: int) -> list[Delivery]:
        """Splits a message into one delivery for each of its emails. Then ack, reject or requeue only these parts."""
        if self._is_open(delivery):
            self._outstanding[delivery.tag] = (1 << count) - 1
        return [delivery._replace(part=part) for part in range(count)]

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Marks these deliveries as done. Acks a message when all its parts (see `split`) are done. If a part was
        rejected or requeued, rejects or requeues the whole message instead. One ack frame covers all messages before
        the first message that is not done. Each later message has its own ack frame."""
        done = {each.tag for each in deliveries if self._settle_part(each)}
        if self._refused:
            for tag in self._refused.keys() & done:
                done.remove(tag)
                requeue = self._refused.pop(tag)
                del self._outstanding[tag]
                if self._session is not None:
                    with suppress(exceptions.AMQPError):  # ignored for the same reason as below
                        self._session.channel.raw.basic_nack(delivery_tag=tag, requeue=requeue)
        prefix = list(takewhile(done.__contains__, self._outstanding))
        for tag in done:
            del self._outstanding[tag]
        acks = [(prefix[-1], True)] if prefix else []
        acks += [(tag, False) for tag in sorted(done.difference(prefix))]
        # Ignore an error: it means that the channel is closing. RabbitMQ then redelivers the messages, and `run` soon
        # opens a new channel.
        if acks and self._session is not None:
            with suppress(exceptions.AMQPError):
                self._session.channel.ack(acks)
                self.acked_count += len(done)

    def reject(self, delivery: Delivery) -> None:
        """Moves the message to the DLQ, because it can never be processed."""
        self._refuse(delivery, requeue=False)

    def requeue(self, delivery: Delivery) -> None:
        """Returns the message to the queue for any consumer."""
        self._refuse(delivery, requeue=True)

    def pause(self) -> None:
        """Returns every delivery to RabbitMQ, and stops consuming until `resume`. Calls `on_lost`. Idempotent. Has no
        effect after `cancel`, so that current deliveries can still be acked."""
        self._resumed.clear()
        if self._session is not None and not self._stopping.is_set():
            self._session.give_up()

    def resume(self) -> None:
        """Ends the pause that `pause` began. Idempotent."""
        self._resumed.set()

    async def pause_lane(self, lane: str) -> None:
        """Stops the deliveries of one lane until `resume_lane`. Earlier deliveries can still be acked or requeued.
        After this method returns, `on_delivery` is not called for this lane. Idempotent."""
        self._paused_lanes.add(lane)
        await self._update_lanes()

    async def resume_lane(self, lane: str) -> None:
        """Ends the pause of a lane. Idempotent."""
        self._paused_lanes.discard(lane)
        await self._update_lanes()

    async def _update_lanes(self) -> None:
        """Starts and cancels consumers, so that exactly the lanes without a pause are consumed."""
        if self._session is not None:
            # Ignore a lost connection: without it, no deliveries arrive. Unless `run` is stopping, it opens a new
            # connection, and consumes exactly the lanes without a pause.
            with suppress(BrokerUnavailable):
                await self._consume_lanes(self._session)

    async def _consume_lanes(self, session: _Session) -> None:
        """Starts and cancels consumers on a channel. Leaves out lanes whose queue does not exist."""
        async with self._lanes_lock:
            unwanted = self._queues.keys() if self._stopping.is_set() else self._paused_lanes
            await session.cancel(unwanted)
            for lane, queue in self._queues.items():
                if lane in self._paused_lanes or self._is_cancelled(lane) or self._stopping.is_set():
                    continue
                try:
                    await session.consume(lane, queue, self._receiver(lane), prefetch=self._prefetch)
                except TopologyError as fault:
                    self._note_missing(lane, fault)
                except ChannelClosed as fault:
                    if fault.code == NOT_FOUND:
                        self._note_cancelled(lane)
                    raise
                else:
                    self._missing_lanes.discard(lane)

    async def _stop_missing_lanes(self, session: _Session) -> None:
        """Cancels the consumers whose queue no longer exists. `_consume_lanes` then reports the queue as missing."""
        async with self._lanes_lock:
            for lane in session.lanes:
                try:
                    # If the check fails, keep the consumer, because the queue may still exist.
                    with suppress(BrokerUnavailable):
                        await find(session.connection, self._queues[lane])
                except TopologyError:
                    await session.cancel([lane])

    def _note_cancelled(self, lane: str) -> None:
        """Notes that RabbitMQ may be deleting the lane's queue. The jitter spreads the consumers of all hosts."""
        self._cancelled_until[lane] = time.monotonic() + CANCELLED_SECONDS * (1 + random.random())  # noqa: S311

    def _is_cancelled(self, lane: str) -> bool:
        return time.monotonic() < self._cancelled_until.get(lane, 0.0)

    def _note_missing(self, lane: str, fault: TopologyError) -> None:
        if lane not in self._missing_lanes:
            self._missing_lanes.add(lane)
            log.error("broker.queue_missing", queue=self._queues[lane], lane=lane, remedy=fault.remedy)

    async def cancel(self) -> None:
        """Stops the deliveries, and stops reconnecting. Current deliveries can still be acked. Idempotent. After this
        method returns, `on_delivery` is not called again."""
        self._stopping.set()
        await self._update_lanes()

    async def close(self) -> None:
        """Stops consuming, and closes the connection. Idempotent. When this method returns, earlier acks have reached
        RabbitMQ. RabbitMQ redelivers all other messages."""
        self._stopping.set()
        self._closing = True
        if self._session is not None:
            self._void()
            await self._session.connection.close()

    async def _may_consume(self) -> bool:
        """Waits until a pause ends. Returns False if the consumer is stopping."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait({stopping, resumed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            resumed.cancel()
        return not self._stopping.is_set()

    async def _consume(self) -> str | None:
        """Consumes over one connection. Returns why consuming ended, or None after `pause`."""
        try:
            async with await open_connection(self._amqp_url, name=self._name, ca_file=self._ca_file) as connection:
                return await self._consume_on(connection)
        except BrokerRefused as fault:
            self._on_refused(fault)
            return str(fault)
        except BrokerUnavailable as fault:
            self._on_attempt()
            return str(fault)

    async def _consume_on(self, connection: Connection) -> str | None:
        channel = await connection.open_channel()
        if self._stopping.is_set() or not self._resumed.is_set():
            return None
        session = self._session = _Session(connection, channel, self._name, self._note_cancelled)
        consumed: list[str] | None = None
        try:
            while not session.is_over:
                await self._stop_missing_lanes(session)
                await self._consume_lanes(session)
                self._on_attempt()
                if session.lanes != consumed:
                    consumed = session.lanes
                    log.info("broker.connected", queues=[self._queues[lane] for lane in consumed])
                metrics.CONSUMING.set(bool(consumed))
                is_looking = self._missing_lanes or any(map(self._is_cancelled, self._queues))
                await session.changed(LOOK_SECONDS if is_looking else self._check_seconds)
        finally:
            metrics.CONSUMING.set(0)
            self._session = None
            self._void()
            if not self._closing:
                self._on_lost()
        return session.reason

    def _receiver(self, lane: str) -> Callable[[Any, Any, Any, bytes], None]:
        """The function that pika calls for each delivery of a lane. It is short, because it runs for every email."""
        generation = self._generation
        outstanding = self._outstanding
        on_delivery = self._on_delivery

        def receive(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            if generation == self._generation:
                tag = method.delivery_tag
                outstanding[tag] = 1
                on_delivery(Delivery(tag, generation, body, method.redelivered, 0, lane))

        return receive

    def _is_open(self, delivery: Delivery) -> bool:
        if delivery.generation != self._generation:
            return False
        return bool(self._outstanding.get(delivery.tag, 0) >> delivery.part & 1)

    def _settle_part(self, delivery: Delivery) -> bool:
        """Marks the delivery as done. Returns True if all other parts of the message are done already."""
        parts, part = self._outstanding.get(delivery.tag, 0), 1 << delivery.part
        if delivery.generation != self._generation or not parts & part:
            return False
        self._outstanding[delivery.tag] = parts ^ part
        return parts == part

    def _refuse(self, delivery: Delivery, *, requeue: bool) -> None:
        """Settles the message when its other parts are done. One requeued part requeues the whole message."""
        # After the redelivery, the worker finds that the emails of the other parts are finished, and again rejects a
        # part that can never be processed.
        if self._is_open(delivery):
            self._refused[delivery.tag] = requeue or self._refused.get(delivery.tag, False)
            self.ack([delivery])

    def _void(self) -> None:
        """Makes all current deliveries void: from now on, calls of `ack`, `reject` and `requeue` ignore them."""
        self._generation += 1
        self._outstanding.clear()
        self._refused.clear()


class _Session:
    """A channel, and the consumers of lanes on this channel."""

    def __init__(
        self, connection: Connection, channel: Channel, name: str, on_cancelled: Callable[[str], None]
    ) -> None:
        """`on_cancelled` is called with each lane whose consumer RabbitMQ has cancelled."""
        self.connection = connection
        self.channel = channel
        self._name = name
        self._on_lane_cancelled = on_cancelled
        self._given_up = False
        self._lanes: dict[str, str] = {}  # by consumer tag
        self._changed = asyncio.Event()
        channel.raw.add_on_cancel_callback(self._on_cancelled)
        channel.closed.add_done_callback(lambda _: self._changed.set())

    @property
    def lanes(self) -> list[str]:
        return [] if self.is_over else [*self._lanes.values()]

    @property
    def is_over(self) -> bool:
        return self._given_up or self.channel.closed.done()

    @property
    def reason(self) -> str | None:
        """Why the session is over; None after `give_up`."""
        return None if self._given_up else str(self.channel.closed.result())

    async def consume(
        self, lane: str, queue: str, receive: Callable[[Any, Any, Any, bytes], None], *, prefetch: int
    ) -> None:
        """Starts consuming a lane. Idempotent. Raises ChannelClosed if the queue was deleted at this moment."""
        tag = f"{self._name} {lane}"
        if self._given_up or tag in self._lanes:
            return
        # `find` uses a separate channel, because RabbitMQ closes the channel on which it reports a missing queue.
        await find(self.connection, queue)
        # RabbitMQ applies a prefetch count only to consumers that start afterwards, so set the count first.
        await self.channel.call(self.channel.raw.basic_qos, prefetch_count=prefetch)
        consumer = {"queue": queue, "on_message_callback": receive, "consumer_tag": tag}
        self._lanes[tag] = lane
        await self.channel.call(self.channel.raw.basic_consume, **consumer)

    async def cancel(self, lanes: Iterable[str]) -> None:
        """Stops the deliveries of these lanes at once, and waits for RabbitMQ's confirmation. Idempotent."""
        tags = [tag for tag, lane in self._lanes.items() if lane in lanes]
        for tag in tags:
            del self._lanes[tag]
        if not tags:
            return
        *others, last = tags
        try:
            # As soon as `basic_cancel` is called, pika returns all further deliveries of the consumer to RabbitMQ.
            for tag in others:
                self.channel.raw.basic_cancel(consumer_tag=tag, callback=lambda _: None)
        except exceptions.AMQPError as error:
            raise self.channel.fault(error) from error
        await self.channel.call(self.channel.raw.basic_cancel, consumer_tag=last)

    def give_up(self) -> None:
        """Ends this session, because `Consumer.pause` was called."""
        self._given_up = True
        self._changed.set()

    async def changed(self, seconds: float) -> None:
        """Waits until RabbitMQ cancels a consumer, until the session is over, or until the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def _on_cancelled(self, cancel: Any) -> None:
        """Called when RabbitMQ has cancelled a consumer, because its queue was deleted or the queue's node is down."""
        if lane := self._lanes.pop(cancel.method.consumer_tag, None):
            self._on_lane_cancelled(lane)
        self._changed.set()
