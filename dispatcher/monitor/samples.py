"""Writes what the operators' page shows: a sample per minute, and the processes of each host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Final

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings
from dispatcher.host.process_table import ProcessStatus, Wait
from dispatcher.monitor.polling import interval_after
from dispatcher.store.connections import Pool, session
from dispatcher.store.samples import QueueDepth, report_processes, save_sample
from dispatcher.telemetry import metrics

SAMPLE_SECONDS: Final = 10.0
"""The row of the current minute is replaced at this interval, so that the newest row is nearly current."""
DLQ: Final = "dlq"
"""The name of the DLQ among the queues of a sample. The other names are lanes."""


class MinuteSampling:
    """Writes the figures that the operators' page shows: one sample per minute, updated every 10 seconds. In each
    interval, the monitor whose round begins first writes it, and counts the cancelled emails in its metrics."""

    interval_seconds = SAMPLE_SECONDS

    def __init__(self, pool: Pool, settings: Settings, queues: Callable[[], dict[str, FoundQueue] | None]) -> None:
        """`queues` returns None if RabbitMQ could not be read."""
        self._pool = pool
        self._names = {settings.queue_of(lane): lane for lane in settings.lanes} | {settings.dlq: DLQ}
        self._queues = queues

    async def run_once(self) -> float:
        began_at = time.monotonic()
        depths = None
        if (found := self._queues()) is not None:
            depths = {name: QueueDepth(*astuple(found[queue])) for queue, name in self._names.items()}
        async with session(self._pool) as opened:
            # A monitor's timer may be a little early, so a sample is already due after 80 % of the interval.
            cancelled = await save_sample(opened, depths, every_seconds=0.8 * SAMPLE_SECONDS)
        metrics.CANCELLED.add(cancelled or 0, "cancelled")
        # With millions of pending emails, a count takes seconds.
        return interval_after(time.monotonic() - began_at, shortest=SAMPLE_SECONDS)


class HostReporting:
    """Records which processes run on a monitor's host. So it also checks that PostgreSQL commits."""

    interval_seconds = SAMPLE_SECONDS

    def __init__(
        self,
        pool: Pool,
        processes: Callable[[], Sequence[ProcessStatus]],
        commit: Wait,
        *,
        holder: str,
        host: str,
        recipients: str = "",
    ) -> None:
        self._pool = pool
        self._commit = commit
        self._processes = processes
        self._holder = holder
        self._host = host
        self._recipients = recipients

    async def run_once(self) -> None:
        async with session(self._pool) as opened:
            self._commit.begin()
            await report_processes(opened, self._holder, self._host, self._processes(), self._recipients)
            self._commit.end()  # not after a failure: the next round then still waits for this commit
