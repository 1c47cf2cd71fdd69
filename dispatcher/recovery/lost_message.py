"""RabbitMQ lost a message: its email is still pending long after its publication, and the leading relay makes it due.

That shows in two ways: the send queue is empty; or emails that were published long after this one are being sent.

A message that a worker holds and has not leased looks the same. A second one is harmless, and there is never a heap of
them: they fill the workers' windows, and from then on the queue is not empty. With bundles a window holds as many times
more, so that a slow provider's workers may get them twice, and here they count as lost.
"""

from __future__ import annotations

from typing import Final

from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings
from dispatcher.errors import TopologyError
from dispatcher.recovery.lost_host import log_rescued
from dispatcher.store.outbox import Outbox
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

LOOK_SECONDS: Final = 10.0
BATCH: Final = 500
MOST_OVERTAKEN: Final = 100
"""At a look. Caps republishing, so that a false alarm cannot flood the queue."""


class LostMessages:
    """A service of the leading relay."""

    def __init__(self, settings: Settings, outbox: Outbox) -> None:
        self._settings = settings
        self._outbox = outbox
        self._age_seconds = settings.lease_seconds / 2
        self.interval_seconds = min(LOOK_SECONDS, self._age_seconds)

    async def run_once(self) -> None:
        """Makes emails due again whose messages are lost.

        Raises:
            BrokerUnavailable: RabbitMQ does not say how long the queue is.
        """
        if not await self._outbox.has_vanished(self._age_seconds):
            return
        settings = self._settings
        try:
            waiting = (await depths(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file))[settings.queue]
        except TopologyError:
            return  # without a queue, nothing can be published
        if waiting:
            count = await self._outbox.republish_overtaken(self._age_seconds, MOST_OVERTAKEN)
        else:
            count = await self._republish_all()
        if count:
            metrics.RECOVERED.add(count, "message_lost")
            get_log().warning("relay.republished", count=count, queue=settings.queue, reason="message_lost")

    async def _republish_all(self) -> int:
        """Returns how many it made due; judges those that a promotion has made uncertain by policy."""
        settings = self._settings
        count = 0
        while True:
            moved, uncertain = await self._outbox.republish_vanished(
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
