"""Reads all messages on the DLQ, and removes selected messages. All other messages keep their positions.

    async with DeadLetterQueue(connection, "email.dispatcher.dlq").scan() as scan:
        async for batch in scan.batches():
            scan.remove(found for found in batch if …)

RabbitMQ has no call to browse a queue. So a scan consumes the messages that are on the queue when it starts, acks none,
and closes its channel. RabbitMQ then returns the unacked messages to the head of the queue, in order. (`basic.nack` for
many messages would not preserve the order: a quorum queue returns them in any order.) Each scan adds one to the
`x-delivery-count` of every message; the limit of the DLQ is a million (see `topology.DELIVERY_LIMIT`).

A concurrent scan would find an empty queue, so only one caller scans at a time (`monitor.dead_letters`). A scan must
read all messages, to preserve their order. A quorum queue delivers returned messages in the order in which they were
returned, and after one scan, all messages are returned messages. If the next scan read only the first messages, they
would come back behind all others. If a process dies during a scan, no message is lost: RabbitMQ closes the channel and
returns its messages to the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Final, NamedTuple

from dispatcher.broker.connection import Channel, Connection, first_of
from dispatcher.domain.values import dataclass, field

WINDOW: Final = 50_000
"""The most messages that a scan reads over one channel, because AMQP's prefetch count has 16 bits. A scan of a deeper
queue uses several channels."""
BATCH: Final = 500
_SILENCE_SECONDS: Final = 5.0
"""If no message arrives for this time, the scan ends: another consumer must have received the remaining messages."""
_REQUEUE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.001
_PAUSE_SECONDS: Final = 0.005
_ACKS_AT_ONCE: Final = 24


class DlqMessage(NamedTuple):
    position: int  # from 0 at the head
    body: bytes
    properties: Any
    redelivered: bool  # a scan counts as a delivery
    window: int  # the index in `DlqScan.windows` of the channel that received the message
    tag: int  # of the delivery on this channel


class DeadLetterQueue:
    """The DLQ. The caller opens and closes the connection."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self.queue = queue

    async def depth(self) -> int:
        """The number of ready messages, without those that are delivered to a consumer and not yet acked."""
        async with self._depth_query() as depth_now:
            return await depth_now()

    @asynccontextmanager
    async def scan(self) -> AsyncIterator[DlqScan]:
        """Reads the messages that are on the queue now. When the `async with` block ends, removes the messages that
        were passed to `remove`, and returns all others. If the connection is lost, all stay on the queue."""
        async with self._depth_query() as depth_now:
            scan = DlqScan(self._connection, self.queue, await depth_now())
            try:
                yield scan
            except BaseException:
                scan.keep_all()
                raise
            finally:
                unread = scan.depth - sum(window.received for window in scan.windows)
                expected = max(0, unread)
                # Close one channel after the other, and wait: RabbitMQ returns a channel's messages with a delay. If
                # two channels returned their messages at the same time, the order of the messages would be lost.
                for window in scan.windows:
                    expected += await window.close()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_REQUEUE_SECONDS):
                            while await depth_now() < expected:  # noqa: ASYNC110 - RabbitMQ does not signal their return
                                await asyncio.sleep(_POLL_SECONDS)

    @asynccontextmanager
    async def _depth_query(self) -> AsyncIterator[Callable[[], Awaitable[int]]]:
        """Yields a function that returns the number of ready messages. All its calls use one channel."""
        channel = await self._connection.open_channel()

        async def depth_now() -> int:
            return int((await channel.find_queue(self.queue)).message_count)

        try:
            yield depth_now
        finally:
            await channel.close()


class DlqScan:
    """A scan that is in progress. `depth`: the number of messages on the queue at the start."""

    def __init__(self, connection: Connection, queue: str, depth: int) -> None:
        self._connection = connection
        self._queue = queue
        self.depth = depth
        self.windows: list[_ScanWindow] = []

    async def batches(self) -> AsyncIterator[list[DlqMessage]]:
        """The messages from the head of the queue, in batches of up to `BATCH`."""
        position = 0
        while position < self.depth:
            window = _ScanWindow(await self._connection.open_channel(), min(WINDOW, self.depth - position))
            self.windows.append(window)
            await window.consume(self._queue)
            while batch := await window.next():
                number = len(self.windows) - 1
                yield [
                    DlqMessage(position + at, body, properties, redelivered, number, tag)
                    for at, (tag, body, properties, redelivered) in enumerate(batch)
                ]
                position += len(batch)
            if window.received < window.size:
                return

    def remove(self, messages: Iterable[DlqMessage]) -> None:
        """Removes these messages when the block of `DeadLetterQueue.scan` ends; none if it ends with an exception.

        A busy RabbitMQ may drop acks to a quorum queue when the channel closes, and redeliver the messages. To be sure,
        scan again until nothing is left to remove (`monitor.dead_letters.remove`).
        """
        for message in messages:
            self.windows[message.window].removed.add(message.tag)

    def keep_all(self) -> None:
        for window in self.windows:
            window.removed.clear()


_Read = tuple[int, bytes, Any, bool]


@dataclass(slots=True)
class _ScanWindow:
    channel: Channel
    size: int
    received: int = 0
    removed: set[int] = field(default_factory=set)
    _unread: list[_Read] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _tag: str = "dispatcher scan"

    async def consume(self, queue: str) -> None:
        await self.channel.call(self.channel.raw.basic_qos, prefetch_count=self.size)
        await self.channel.call(
            self.channel.raw.basic_consume, queue=queue, on_message_callback=self._receive, consumer_tag=self._tag
        )

    def _receive(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.received += 1
        self._unread.append((method.delivery_tag, body, properties, method.redelivered))
        if len(self._unread) >= BATCH or self.received == self.size:
            self._arrived.set()

    async def next(self) -> list[_Read]:
        """The next messages. Empty if all messages were read, or if no more arrive."""
        if len(self._unread) < BATCH and self.received < self.size:
            self._arrived.clear()
            arrived = asyncio.ensure_future(self._arrived.wait())
            try:
                await first_of(arrived, self.channel.closed, seconds=_SILENCE_SECONDS)
            finally:
                arrived.cancel()
            if self.channel.closed.done():
                raise self.channel.closed.result()
        batch, self._unread = self._unread[:BATCH], self._unread[BATCH:]
        return batch

    async def close(self) -> int:
        """Acks the removed messages, and returns all other messages to the queue. Returns how many were returned."""
        if self.channel.closed.done():
            return 0
        if self.removed:
            # Cancel the consumer first. Otherwise, RabbitMQ would deliver another message after each ack.
            await self.channel.call(self.channel.raw.basic_cancel, consumer_tag=self._tag)
            # Ack all messages before the first kept message with one frame, the others a few at a time.
            first_kept = next(tag for tag in count(1) if tag not in self.removed)
            if first_kept > 1:
                self.channel.raw.basic_ack(first_kept - 1, multiple=True)
            others = sorted(tag for tag in self.removed if tag > first_kept)
            for at in range(0, len(others), _ACKS_AT_ONCE):
                for tag in others[at : at + _ACKS_AT_ONCE]:
                    self.channel.raw.basic_ack(tag)
                # RabbitMQ passes at most 32 commands of a channel to a quorum queue at a time, and drops all further
                # commands if the channel closes meanwhile. So after a few acks, send a command that changes nothing,
                # and wait for the answer.
                await self.channel.call(self.channel.raw.basic_qos, prefetch_count=self.size)
                await asyncio.sleep(_PAUSE_SECONDS)
        await self.channel.close()
        return self.received - len(self.removed)
