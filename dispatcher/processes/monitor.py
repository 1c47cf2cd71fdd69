"""The monitor process: serves its host's status pages, alerts operators, and prunes. No email passes through it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import uvloop

from dispatcher.alerts.channels import LogChannel, channels_of
from dispatcher.config import Settings
from dispatcher.host.lifecycle import stop_event
from dispatcher.host.process_table import ChildContext
from dispatcher.host.services import Periodic, Task, run_tasks
from dispatcher.maintenance.alert_checks import AlertChecks
from dispatcher.maintenance.alert_sender import AlertSender
from dispatcher.maintenance.alert_state import AlertState
from dispatcher.maintenance.dlq_depth import depth_of_dlq
from dispatcher.maintenance.pruning import OneTimeCodePruning, PruningService
from dispatcher.monitor.pages import pages_of
from dispatcher.store.alerts import AlertStore
from dispatcher.store.connections import make_pool
from dispatcher.store.retention import Retention
from dispatcher.telemetry import log, metric_files

IDLE_MARGIN_SECONDS: Final = 30.0
"""In addition to two probe intervals. PostgreSQL ends a session that is idle for longer: another monitor may alert."""


def run_monitor(settings: Settings, context: ChildContext) -> int:
    """Runs the monitor until it is stopped; returns the exit code."""
    log.configure(settings.log_level, settings.log_format, worker="monitor")
    uvloop.run(_monitor(settings, context))
    return 0


async def _monitor(settings: Settings, context: ChildContext) -> None:
    stop = stop_event(context)
    retention = Retention.of(settings)
    pool = make_pool(settings.database_url, name="dispatcher monitor", size=1)
    # Does not wait for a connection: the monitor must run and alert even while PostgreSQL is unreachable.
    await pool.open()
    alert_store = AlertStore(
        settings.database_url,
        queue=settings.dlq,
        # Stable across restarts. Includes the run directory, because a host may have several.
        holder=f"{settings.host_name}:{sha256(str(settings.run_dir).encode()).hexdigest()[:8]}",
        host=settings.host_name,
        retention=retention,
        idle_seconds=2 * settings.dlq_probe_seconds + IDLE_MARGIN_SECONDS,
    )
    context.process_slot.mark_up()
    try:
        pruning = [
            Periodic(OneTimeCodePruning(pool, retention)),
            Periodic(PruningService(settings.database_url, retention)),
        ]
        pages = pages_of(settings, pool, context.process_table)
        tasks = [*_alerting(settings, alert_store), *pruning, *pages, *_event_polling(settings)]
        await run_tasks(tasks, stop, process="monitor")
    finally:
        await alert_store.leave()
        await pool.close()
    log.get_log().info("monitor.stopped")


def _event_polling(settings: Settings) -> Sequence[Task]:
    """The task that polls the queue with providers' events; empty if no queue is configured."""
    if not settings.ses_events_queue_url:
        return ()
    from dispatcher.events.sqs import QueuePolling

    if settings.metrics:
        metric_files.begin(settings.metrics_folder, "monitor")
    return [QueuePolling(settings)]


def _alerting(settings: Settings, store: AlertStore) -> Sequence[Task]:
    """The DLQ probe, and one alert sender per channel. The log is also a channel."""
    book = AlertState(store)
    watch = AlertChecks(
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
        AlertSender(channel, watch, book, reminder_seconds=reminder_seconds)
        for channel in (LogChannel(), *channels_of(settings))
    ]
    return [Periodic(watch), *announcers]
