"""The monitor process: serves the pages of its host, alerts operators, and prunes. No email passes through it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import uvloop

from dispatcher.alerts.channels import LogChannel, channels_of
from dispatcher.config import Settings
from dispatcher.host.lifecycle import stop_event
from dispatcher.host.roster import Post
from dispatcher.host.services import Periodic, Task, keep
from dispatcher.maintenance.alert_book import AlertBook
from dispatcher.maintenance.announcing import Announcer
from dispatcher.maintenance.dlq_alert import DlqAlert
from dispatcher.maintenance.dlq_depth import depth_of_dlq
from dispatcher.maintenance.pruning import ForgetCodes, Prune
from dispatcher.monitor.pages import pages_of
from dispatcher.store.alerts import AlertStore
from dispatcher.store.connections import make_pool
from dispatcher.store.retention import Retention
from dispatcher.telemetry import log

IDLE_MARGIN_SECONDS: Final = 30.0
"""Beyond two looks: a monitor that says nothing for so long does not keep the turn to alert."""


def run_monitor(settings: Settings, post: Post) -> int:
    """Watches until told to stop; returns the exit code."""
    log.configure(settings.log_level, settings.log_format, worker="monitor")
    uvloop.run(_monitor(settings, post))
    return 0


async def _monitor(settings: Settings, post: Post) -> None:
    stop = stop_event(post)
    retention = Retention.of(settings)
    pool = make_pool(settings.database_url, name="dispatcher monitor", size=1)
    # Waits for nobody: a PostgreSQL that is away is something to watch, and no reason not to.
    await pool.open()
    alert_store = AlertStore(
        settings.database_url,
        queue=settings.dlq,
        # The same over restarts; a host may have several run directories.
        holder=f"{settings.host_name}:{sha256(str(settings.run_dir).encode()).hexdigest()[:8]}",
        host=settings.host_name,
        retention=retention,
        idle_seconds=2 * settings.dlq_probe_seconds + IDLE_MARGIN_SECONDS,
    )
    post.seat.up()
    try:
        pruning = [Periodic(ForgetCodes(pool, retention)), Periodic(Prune(settings.database_url, retention))]
        tasks = [*_alerting(settings, alert_store), *pruning, *pages_of(settings, pool, post.roster)]
        await keep(tasks, stop, process="monitor")
    finally:
        await alert_store.leave()
        await pool.close()
    log.get_log().info("monitor.stopped")


def _alerting(settings: Settings, store: AlertStore) -> Sequence[Task]:
    """The looks at the DLQ, and a task per channel; our own log is one."""
    book = AlertBook(store)
    watch = DlqAlert(
        settings.dlq,
        depth_of_dlq(settings),
        store,
        book,
        host=settings.host_name,
        interval_seconds=settings.dlq_probe_seconds,
        after_seconds=settings.alert_after_seconds,
        providers=settings.providers,
    )
    reminder_seconds = settings.alert_reminder_seconds
    announcers = [
        Announcer(channel, watch, book, reminder_seconds=reminder_seconds)
        for channel in (LogChannel(), *channels_of(settings))
    ]
    return [Periodic(watch), *announcers]
