"""The monitor process: what is opened in which order, and closed again when it stops."""

from __future__ import annotations

from typing import Final

import uvloop

from dispatcher.config import Settings
from dispatcher.host.lifecycle import stop_event
from dispatcher.host.roster import Post
from dispatcher.host.services import keep
from dispatcher.monitor.tasks import tasks_of
from dispatcher.store.connections import make_pool
from dispatcher.telemetry import log

POOL_SIZE: Final = 2
"""A task that waits for a slow statement leaves one for the others."""


def run_monitor(settings: Settings, post: Post) -> int:
    """Watches until told to stop; returns the exit code."""
    log.configure(settings.log_level, settings.log_format, worker="monitor")
    uvloop.run(_monitor(settings, post))
    return 0


async def _monitor(settings: Settings, post: Post) -> None:
    stop = stop_event(post)
    pool = make_pool(settings.database_url, name="dispatcher monitor", size=POOL_SIZE)
    # Waits for nobody: a PostgreSQL that is away is something to watch, and no reason not to.
    await pool.open()
    post.seat.up()
    try:
        await keep(tasks_of(settings, pool, post.roster), stop, process="monitor")
    finally:
        await pool.close()
    log.get_log().info("monitor.stopped")
