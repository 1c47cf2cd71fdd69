"""Decides how many more emails a publisher may publish to a queue, and how many of them share a message.

A queue keeps its order, so a more urgent email cannot overtake the emails that are on the queue already. Therefore, a
publisher with a backlog keeps only as many emails on the queue as the workers send in a fraction of a second. While it
publishes, it asks RabbitMQ for the number of ready messages, and calculates from the last two counts how fast workers
take messages. RabbitMQ does not count the messages in a worker's prefetch window as ready. These messages keep the
worker busy between two batches.

A prefetch window limits messages, not emails. So emails share a message only while workers are fast: the emails in full
windows must not be more than the workers send in WINDOW_SECONDS. And a batch has several messages for each consumer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from dispatcher.broker.topology import FoundQueue
from dispatcher.errors import BrokerUnavailable, TopologyError

TARGET_SECONDS: Final = 0.25
"""The target depth of the queue is the number of emails that the workers take in this time."""
COUNT_SECONDS: Final = 0.1
"""The shortest time between two counts. A shorter time would make the rate inexact."""
ANSWER_SECONDS: Final = 0.003
"""The time that a publisher waits for RabbitMQ's answer to a count."""
LONGEST_COUNT_SECONDS: Final = 0.25
"""The longest time between two counts while workers take no messages."""
LEAST_EMAILS: Final = 100
"""The smallest target, for workers that are slow."""
EMPTY_EMAILS: Final = 1000
"""The smallest target while the queue is empty. Workers then take every message at once, so it is unknown how many more
they could take. If the publisher uses all of this target, the next count, 0.1 s later, raises the target."""
LEAST_SHARE: Final = 4
"""A credit of at most a quarter (1 / LEAST_SHARE) of the target counts as 0, because small batches cost more per
email."""
DECAY: Final = 0.7
"""If a count shows a lower rate, the new rate is at least this fraction of the old rate. So a short pause of the
workers changes the rate only a little."""
WINDOW_SECONDS: Final = 0.5
"""If the prefetch windows of all workers are full, they hold about as many emails as the workers take in this time; or
one email per message, if this is more."""
MESSAGES_PER_CONSUMER: Final = 4
"""The least number of messages for each consumer in a batch whose emails share messages. RabbitMQ delivers to the
consumers in turn, so they get about equal parts."""
RECENT_SECONDS: Final = 1.0
"""Emails share messages only if the last count is at most this old."""
NOTED_BATCHES: Final = 256
"""Of this many batches, the numbers of messages and emails are known."""


class QueueCredit:
    """How many more emails one publisher may publish to one queue now. Use it in one event loop."""

    def __init__(self, find: Callable[[], Awaitable[FoundQueue]], *, most_per_message: int, prefetch: int) -> None:
        """`find` returns the queue's current counts. `prefetch`: the size of a worker's prefetch window."""
        self._find = find
        self._most_per_message = most_per_message
        self._prefetch = prefetch
        self._target = EMPTY_EMAILS
        self._ready: int | None = None  # emails on the queue at the last count
        self._published = 0  # emails since the last count, also those that the caller will publish at once
        self._written = 0  # those that `note_messages` was called for
        self._batches: deque[tuple[int, int]] = deque(maxlen=NOTED_BATCHES)  # messages and emails, oldest batch first
        self._consumers = 0
        self._rate = 0.0
        self._taken = 0.0  # emails per second that workers took between the last two counts
        self._sustained = 0.0  # the lower of the last two values of `_taken`
        self._counted_at = 0.0
        self._interval = COUNT_SECONDS
        self._count: asyncio.Task[None] | None = None
        self._fault: BrokerUnavailable | None = None

    @property
    def emails(self) -> int:
        """How many emails may be published now, so that the queue reaches its target depth (see TARGET_SECONDS).

        0 until RabbitMQ has counted the queue's messages once, and while the queue has three quarters of the target or
        more. If the queue has at least half of the target, asks RabbitMQ in the background to count again. Raises
        BrokerUnavailable if RabbitMQ did not answer the last time.
        """
        left = 0 if self._ready is None else self._target - self._ready - self._published
        if left <= self._target // 2 and (self._count is None or self._count.done()):
            self._count = asyncio.create_task(self._note_count())
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        return left if left > self._target // LEAST_SHARE else 0

    @property
    def wait_seconds(self) -> float:
        """The seconds until the answer to RabbitMQ's next count, which may increase `emails`."""
        return max(0.0, self._counted_at + self._interval - time.monotonic()) + ANSWER_SECONDS

    def take(self, emails: int) -> None:
        """Reduces the credit by this many emails. A negative number gives unused credit back."""
        self._published += emails

    def per_message(self, emails: int) -> int:
        """The most emails that share a message, if the caller publishes this many emails now.

        1 until two counts have shown how fast workers are: the first count of a burst shows only how fast the prefetch
        windows are filled.
        """
        if not self._consumers or time.monotonic() - self._counted_at > RECENT_SECONDS:
            return 1
        in_windows = self._sustained * WINDOW_SECONDS / (self._consumers * self._prefetch)
        return max(1, min(self._most_per_message, emails // (self._consumers * MESSAGES_PER_CONSUMER), int(in_windows)))

    def note_messages(self, messages: int, emails: int) -> None:
        """Notes in how many messages the emails are published, because RabbitMQ counts only messages."""
        self._written += emails
        self._batches.append((messages, emails))

    async def counted(self) -> None:
        """Waits for RabbitMQ's answer, if RabbitMQ is counting the queue's messages now."""
        if self._count is not None:
            await asyncio.wait([self._count])

    async def close(self) -> None:
        """Stops waiting for RabbitMQ's answer to a count. Idempotent."""
        if self._count is not None:
            self._count.cancel()
            await asyncio.gather(self._count, return_exceptions=True)

    async def _note_count(self) -> None:
        if (seconds := self._counted_at + self._interval - time.monotonic()) > 0:
            await asyncio.sleep(seconds)
        began_at = time.monotonic()
        published, written = self._published, self._written
        try:
            found = await self._find()
        except TopologyError:
            found = FoundQueue(0, 0)  # the queue is missing: the publisher reports this when it publishes
        except BrokerUnavailable as fault:
            self._fault = fault
            self._counted_at = time.monotonic()
            return
        self._consumers = found.consumers
        ready = self._emails_in(found.messages) + max(0, published - written)
        if self._ready is not None:
            taken = max(0, self._ready + published - ready) / max(COUNT_SECONDS, began_at - self._counted_at)
            self._rate = max(taken, self._rate * DECAY)
            self._sustained, self._taken = min(taken, self._taken), taken
            self._interval = COUNT_SECONDS if taken else min(2 * self._interval, LONGEST_COUNT_SECONDS)
            self._target = max(LEAST_EMAILS if ready else EMPTY_EMAILS, round(self._rate * TARGET_SECONDS))
        self._ready = ready
        # Subtract only the emails that were published before the count. RabbitMQ may not have counted later emails.
        self._published -= published
        self._written -= written
        self._counted_at = began_at

    def _emails_in(self, ready: int) -> int:
        """To how many emails the ready messages point: the last ones. Another publisher's message counts as one."""
        found = 0.0
        for messages, emails in reversed(self._batches):
            if ready <= messages:
                return round(found + emails * ready / messages)
            ready -= messages
            found += emails
        return round(found) + ready
