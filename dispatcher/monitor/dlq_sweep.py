"""The service that removes stale dead letters from the DLQ (see `dead_letters`)."""

from __future__ import annotations

from dispatcher.broker.connection import open_connection
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.config import Settings
from dispatcher.errors import DispatcherError, StoreUnavailable
from dispatcher.monitor.dead_letters import sweep
from dispatcher.monitor.dlq_depth import Depth
from dispatcher.store.connections import connect_async
from dispatcher.store.failures import count_dead_lettered
from dispatcher.store.named_locks import named_lock
from dispatcher.telemetry.log import get_log


class DlqSweep:
    """Removes stale dead letters from the DLQ. A service of monitors; one of them sweeps at a time.

    It reads the DLQ only if there are more messages than emails that must have a dead letter, and more of these surplus
    messages than the last sweep left: poison messages, and dead letters of emails that no longer exist. What it left is
    what it saw: a count of messages is late, and would hide as many stale dead letters from all later sweeps. It does
    not read again while both counts stay the same.
    """

    def __init__(self, settings: Settings, depth: Depth) -> None:
        self.interval_seconds = settings.dlq_probe_seconds
        self._settings = settings
        self._depth = depth
        self._surplus = 0
        self._counts = (0, 0)

    async def run_once(self) -> None:
        """Sweeps the DLQ if necessary. While RabbitMQ is unreachable, does nothing: an alert says so."""
        settings = self._settings
        async with (
            await connect_async(settings.database_url, name="dispatcher dlq sweep") as session,
            named_lock(session, "dlq sweep") as is_ours,
        ):
            if not is_ours:
                return
            letters = await count_dead_lettered(session)
            try:
                depth = await self._depth()
            except DispatcherError:
                return  # the alert `probe_failed` reports it
            surplus = max(0, depth - letters)  # a count of messages is late: while emails fail, it is too low
            if (depth, letters) == self._counts:
                return
            if surplus > self._surplus:
                try:
                    name = "dispatcher dlq sweep"
                    async with await open_connection(settings.amqp_url, name=name, ca_file=settings.ca_file) as broker:
                        swept = await sweep(session, DeadLetterQueue(broker, settings.dlq))
                except StoreUnavailable:
                    raise
                except DispatcherError as error:
                    get_log().warning("dlq.not_swept", reason=error.message, remedy=error.remedy)
                    return
                surplus = max(0, swept.left - letters)
                if swept.removed:
                    get_log().info("dlq.swept", count=swept.removed)
            self._surplus, self._counts = surplus, (depth, letters)
