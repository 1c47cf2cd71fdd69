"""Makes an email due again after RabbitMQ has lost its message.

The leading relay does this. A message counts as lost if its email is still pending long after the message was
published, and one of two conditions is true: the send queue is empty, or workers are sending emails whose messages were
published long after this message.

An unleased message in a worker's prefetch window meets the same conditions. A second message for its email is harmless,
and duplicates cannot pile up: they fill the prefetch windows, and from then on the queue is not empty. With bundles, a
window contains several times as many emails. The workers of a slow provider may then get duplicates; this module counts
them as lost messages.
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

POLL_SECONDS: Final = 10.0
BATCH: Final = 500
MAX_OVERTAKEN: Final = 100
"""The most emails per round. Caps republishing, so that a false alarm cannot flood the queue."""


class LostMessages:
    """A service of the leading relay."""

    def __init__(self, settings: Settings, outbox: Outbox) -> None:
        self._settings = settings
        self._outbox = outbox
        self._age_seconds = settings.lease_seconds / 2
        self.interval_seconds = min(POLL_SECONDS, self._age_seconds)

    async def run_once(self) -> None:
        """Makes emails due again whose messages are lost.

        Raises:
            BrokerUnavailable: RabbitMQ does not report the length of the queue.
        """
        if not await self._outbox.has_lost_messages(self._age_seconds):
            return
        settings = self._settings
        try:
            waiting = (await depths(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file))[settings.queue]
        except TopologyError:
            return  # the queue does not exist, so nothing can be published
        if waiting:
            count = await self._outbox.republish_overtaken(self._age_seconds, MAX_OVERTAKEN)
        else:
            count = await self._republish_all()
        if count:
            metrics.RECOVERED.add(count, "message_lost")
            get_log().warning("relay.republished", count=count, queue=settings.queue, reason="message_lost")

    async def _republish_all(self) -> int:
        """Makes emails with lost messages due. After a promotion, also holds or resends uncertain emails, by policy.

        Returns how many emails became due.
        """
        settings = self._settings
        count = 0
        while True:
            moved, uncertain = await self._outbox.republish_lost(
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
