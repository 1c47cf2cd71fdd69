"""Makes an email due again after RabbitMQ has lost its message.

The leading relay does this. A message counts as lost if its email is still pending long after the message was
published, and one of two conditions is true. Either the send queue of the email's lane is empty, or workers already
send emails whose messages were published to the same queue long after this message. No worker receives the messages of
a paused lane, so a paused lane is checked only after the pause.

A message also looks lost while it waits in a worker's prefetch window, before the worker leases the email. The email
then gets a second message, which is harmless. Second messages cannot accumulate: when they have filled the prefetch
windows, further messages stay on the queue, so the queue is no longer empty. If a provider becomes slow during a
backlog, the windows hold several emails per message. Its workers can then receive second messages, although no message
was lost, and the metrics count the emails of these messages as recovered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings
from dispatcher.domain.lanes import NORMAL
from dispatcher.errors import TopologyError
from dispatcher.recovery.lost_host import log_rescued
from dispatcher.store.outbox import Outbox
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

POLL_SECONDS: Final = 10.0
BATCH: Final = 500
MAX_OVERTAKEN: Final = 100
"""If the queue is not empty, one round makes at most this many emails due, so that a false alarm cannot flood the
queue."""


class LostMessages:
    """A service of the leading relay: makes emails due again if their messages are lost."""

    def __init__(self, settings: Settings, outbox: Outbox, find: Callable[[str], Awaitable[FoundQueue]]) -> None:
        self._settings = settings
        self._outbox = outbox
        self._find = find
        self._age_seconds = settings.lease_seconds / 2
        self.interval_seconds = min(POLL_SECONDS, self._age_seconds)

    async def run_once(self) -> None:
        settings = self._settings
        lanes_of: dict[str, list[str]] = {}
        for lane in await self._outbox.find_lost_messages(self._age_seconds):
            lanes_of.setdefault(settings.queue_of(lane if lane in settings.lanes else NORMAL), []).append(lane)
        if not lanes_of:
            return
        controls = await self._outbox.read_controls()
        for queue, lanes in lanes_of.items():
            if lanes := [lane for lane in lanes if controls.pause_of_lane(lane) is None]:
                await self._republish(queue, lanes)

    async def _republish(self, queue: str, lanes: Sequence[str]) -> None:
        try:
            found = await self._find(queue)
        except TopologyError:
            return  # the queue does not exist, so nothing can be published
        if found.messages:
            count = await self._outbox.republish_overtaken(lanes, self._age_seconds, MAX_OVERTAKEN)
        else:
            count = await self._republish_all(lanes)
        if count:
            metrics.RECOVERED.add(count, "message_lost")
            get_log().warning("relay.republished", count=count, queue=queue, reason="message_lost")

    async def _republish_all(self, lanes: Sequence[str]) -> int:
        """Makes emails of these lanes due again if their messages are lost; returns how many. Those that a promotion
        made uncertain (see `lost_commits`) are held or sent again, by policy."""
        settings = self._settings
        count = 0
        while True:
            moved, uncertain = await self._outbox.republish_lost(
                lanes,
                self._age_seconds,
                BATCH,
                settings.on_uncertain,
                settings.max_attempts,
                doubt_seconds=settings.lease_seconds,
            )
            log_rescued(uncertain, "promotion")
            count += moved
            if not (moved or uncertain):
                return count
