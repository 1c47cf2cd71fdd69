"""Checks every hour that the tables have partitions for the next weeks. Creates the missing partitions."""

from __future__ import annotations

from typing import Final

from dispatcher.store.connections import Pool, session
from dispatcher.store.named_locks import named_lock
from dispatcher.store.outbox import Outbox
from dispatcher.telemetry.log import get_log

LOCK_NAME: Final = "partitions"


class Partitions:
    """Creates the partitions of the next weeks. A service of each relay, but only one relay at a time does the work."""

    interval_seconds = 3600.0

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def run_once(self) -> None:
        """Creates the missing partitions, unless another relay is doing so."""
        async with session(self._pool) as opened, named_lock(opened, LOCK_NAME) as is_ours:
            if is_ours and (names := await Outbox(opened).make_partitions()):
                get_log().info("partition.created", names=names)
