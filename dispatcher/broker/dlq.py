"""Looking into the DLQ without changing it: every message is read, and all that is not removed goes back to its place.

    async with DeadLetterQueue(connection, "email.dispatcher.dlq").look() as look:
        async for batch in look.batches():
            look.remove(found for found in batch if …)

RabbitMQ has no way to read a queue and leave it alone. So a look consumes the messages that were there when it began,
acks none, and closes its channel: RabbitMQ then returns what was not acked to the head of the queue, in its order. (A
`basic.nack` for many at once would not: a quorum queue returns those in any order.) The price is one delivery in the
message's `x-delivery-count`; both queues' limit is a million. Whoever looks at the same time sees an empty queue, so
callers take turns (`ops.dead_letters`). And who looks takes all: a quorum queue puts what it gets back behind what it
got back before, so that a look at the first few would make them the last. A process that dies while it looks loses
nothing: its channel is closed for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple

from dispatcher.broker.connection import Channel, Connection, first_of

WINDOW: Final = 50_000
"""Messages that one channel holds; AMQP's prefetch has 16 bits. A deeper queue is held by several channels."""
BATCH: Final = 500
_SILENCE_SECONDS: Final = 5.0
"""A queue that says nothing for so long has no more for us: somebody else consumes it, too."""
_RETURN_SECONDS: Final = 10.0
_ASK_AGAIN_SECONDS: Final = 0.001
_BREATH_SECONDS: Final = 0.005
_ACKS_AT_ONCE: Final = 24


class Found(NamedTuple):
    """A message on the DLQ.

    Attributes:
        position: From 0, at the head.
        properties: As AMQP has them.
        redelivered: Somebody had it before; a look counts.
    """

    position: int
    body: bytes
    properties: Any
    redelivered: bool
    window: int
    tag: int


class DeadLetterQueue:
    """The DLQ, over a connection that the caller opens and closes."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self._connection = connection
        self.queue = queue

    async def depth(self) -> int:
        """How many messages wait; those that somebody holds are not counted.

        Raises:
            TopologyError: there is no such queue.
        """
        async with self._asking() as depth_now:
            return await depth_now()

    @asynccontextmanager
    async def look(self) -> AsyncIterator[Look]:
        """The messages that are there now; whatever is not removed is back when the block ends.

        Raises:
            TopologyError: there is no such queue.
            BrokerUnavailable: the connection is lost. What was not acked is on the queue.
        """
        async with self._asking() as depth_now:
            look = Look(self._connection, self.queue, await depth_now())
            try:
                yield look
            except BaseException:
                look.keep_all()
                raise
            finally:
                await self._give_back(look, depth_now)

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[Callable[[], Awaitable[int]]]:
        """What asks for the depth, as often as needed, over one channel."""
        channel = await self._connection.open_channel()

        async def depth_now() -> int:
            return int((await channel.find_queue(self.queue)).message_count)

        try:
            yield depth_now
        finally:
            await channel.close()

    async def _give_back(self, look: Look, depth_now: Callable[[], Awaitable[int]]) -> None:
        expected = max(0, look.depth - sum(window.received for window in look.windows))  # what was never read
        for window in look.windows:  # in order, each only when the one before is back: else their order is anybody's
            expected += await window.close()
            await _until_back(expected, depth_now)


class Look:
    """One look, under way.

    Attributes:
        depth: How many messages waited when it began.
    """

    def __init__(self, connection: Connection, queue: str, depth: int) -> None:
        self._connection = connection
        self._queue = queue
        self.depth = depth
        self.windows: list[_Window] = []

    async def batches(self) -> AsyncIterator[list[Found]]:
        """The messages, from the head of the queue, in batches of up to `BATCH`."""
        position = 0
        while position < self.depth:
            window = _Window(await self._connection.open_channel(), min(WINDOW, self.depth - position))
            self.windows.append(window)
            await window.consume(self._queue)
            while batch := await window.next():
                number = len(self.windows) - 1
                yield [
                    Found(position + at, body, properties, redelivered, number, tag)
                    for at, (tag, body, properties, redelivered) in enumerate(batch)
                ]
                position += len(batch)
            if window.received < window.size:
                return

    def remove(self, messages: Iterable[Found]) -> None:
        """Takes these off the queue at the end of the block; not if it ends by an exception.

        A busy RabbitMQ may drop acks to a quorum queue at a channel's close, and so bring messages back. Whoever has
        to be sure looks again, until there is nothing left to remove (`ops.dead_letters.remove`).
        """
        for message in messages:
            self.windows[message.window].removed.add(message.tag)

    def keep_all(self) -> None:
        """Removes nothing after all."""
        for window in self.windows:
            window.removed.clear()


_Read = tuple[int, bytes, Any, bool]


@dataclass(slots=True)
class _Window:
    """The messages that one channel holds."""

    channel: Channel
    size: int
    received: int = 0
    removed: set[int] = field(default_factory=set)
    _unread: list[_Read] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _tag: str = "look"

    async def consume(self, queue: str) -> None:
        await self.channel.call(self.channel.raw.basic_qos, prefetch_count=self.size)
        await self.channel.call(
            self.channel.raw.basic_consume, queue=queue, on_message_callback=self._receive, consumer_tag=self._tag
        )

    def _receive(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self.received += 1
        self._unread.append((method.delivery_tag, body, properties, method.redelivered))
        if len(self._unread) >= BATCH or self.received == self.size:
            self._news.set()

    async def next(self) -> list[_Read]:
        """The next messages; none once all have been read, or nobody sends more."""
        if len(self._unread) < BATCH and self.received < self.size:
            await self._until_news()
        batch, self._unread = self._unread[:BATCH], self._unread[BATCH:]
        return batch

    async def _until_news(self) -> None:
        self._news.clear()
        news = asyncio.ensure_future(self._news.wait())
        try:
            await first_of(news, self.channel.closed, seconds=_SILENCE_SECONDS)
        finally:
            news.cancel()
        if self.channel.closed.done():
            raise self.channel.closed.result()

    async def close(self) -> int:
        """Acks what was removed and gives back the rest; returns how many that are."""
        if self.channel.closed.done():
            return 0
        if self.removed:
            # First no more deliveries, for each ack makes room for one.
            await self.channel.call(self.channel.raw.basic_cancel, consumer_tag=self._tag)
            await self._ack()
        await self.channel.close()
        return self.received - len(self.removed)

    async def _ack(self) -> None:
        """Acks what was removed: up to the first that stays in one frame, then a few at a time."""
        first_kept = next(tag for tag in count(1) if tag not in self.removed)
        if first_kept > 1:
            self.channel.raw.basic_ack(first_kept - 1, multiple=True)
        rest = sorted(tag for tag in self.removed if tag > first_kept)
        for at in range(0, len(rest), _ACKS_AT_ONCE):
            for tag in rest[at : at + _ACKS_AT_ONCE]:
                self.channel.raw.basic_ack(tag)
            # RabbitMQ's channel puts off what goes beyond 32 commands to a quorum queue, and drops that at its close.
            await self.channel.call(self.channel.raw.basic_qos, prefetch_count=self.size)
            await asyncio.sleep(_BREATH_SECONDS)


async def _until_back(expected: int, depth_now: Callable[[], Awaitable[int]]) -> None:
    """Waits until so many messages are on the queue; a closed channel's come back a moment later."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_RETURN_SECONDS):
            while await depth_now() < expected:  # noqa: ASYNC110 - nobody announces their return
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
