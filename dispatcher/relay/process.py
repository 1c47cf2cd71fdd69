"""The relay process: what is opened in which order, and closed again when it stops."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Final

import uvloop

from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.host.lifecycle import stop_event
from dispatcher.host.roster import Post
from dispatcher.relay.publishing import Publishing
from dispatcher.relay.settlement import Settlement
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from dispatcher.telemetry import log, metric_files

LAST_ROUND_SECONDS: Final = 3.0
"""For what the workers' last results made due; what is still due then is found by the next relay."""
CLOSE_SECONDS: Final = 1.0
"""A RabbitMQ that hangs must not delay the end: everything is confirmed by now, or due again."""


def run_relay(settings: Settings, post: Post) -> int:
    """Publishes and settles until told to stop; returns the exit code."""
    log.configure(settings.log_level, settings.log_format, worker="relay")
    if settings.metrics:
        metric_files.begin(settings.metrics_folder, "relay")
    uvloop.run(_relay(settings, post))
    return 0


async def _relay(settings: Settings, post: Post) -> None:
    stop = stop_event(post)
    pool = make_pool(settings.database_url, name="dispatcher relay settlement", size=1, lock_seconds=BATCH_LOCK_SECONDS)
    await pool.open()
    name = f"dispatcher relay {settings.host_name}:{os.getpid()}"
    publisher = Publisher(settings.amqp_url, settings.exchange, name=name, ca_file=settings.ca_file)
    settlement = Settlement(settings, pool)
    publishing = Publishing(settings, publisher, lambda: settlement.workers_here, post.seat)
    tasks = [asyncio.create_task(publishing.run()), asyncio.create_task(settlement.run())]
    stopped = asyncio.create_task(stop.wait())
    post.seat.up()
    try:
        ended, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_ROUND_SECONDS):
                await settlement.settle_all()
                publishing.stop()
                await tasks[0]
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await publisher.close()
        await pool.close()
    log.get_log().info("relay.stopped")
