"""Makes the partitions of the next weeks, hourly."""

from __future__ import annotations

from typing import Final

from dispatcher.store.connections import Pool, session
from dispatcher.store.outbox import Outbox
from dispatcher.store.turns import turn
from dispatcher.telemetry.log import get_log

TURN: Final = "partitions"


class Partitions:
    """A service of each relay."""

    interval_seconds = 3600.0

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def run_once(self) -> None:
        """Makes what is missing, unless another relay is about it."""
        async with session(self._pool) as opened, turn(opened, TURN) as is_ours:
            if is_ours and (names := await Outbox(opened).make_partitions()):
                get_log().info("partition.created", names=names)
