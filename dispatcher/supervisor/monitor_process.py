"""The monitor process: serves its host's status pages, alerts operators, deletes old data, posts events to webhooks.

No email passes through this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final

import uvloop

from dispatcher.config import Settings
from dispatcher.events.intake import EventIntake, suppression_rules
from dispatcher.events.webhook_delivery import WebhookDelivery
from dispatcher.host.lifecycle import stop_event
from dispatcher.host.process_table import ChildContext
from dispatcher.host.services import Periodic, Task, run_tasks
from dispatcher.monitor.alert_channels import LogChannel, channels_of
from dispatcher.monitor.alert_checks import AlertChecks
from dispatcher.monitor.alert_sender import AlertSender
from dispatcher.monitor.alert_state import AlertState
from dispatcher.monitor.dlq_depth import Depth, depth_of_dlq
from dispatcher.monitor.dlq_sweep import DlqSweep
from dispatcher.monitor.message_polling import MessagePolling
from dispatcher.monitor.pages import pages_of, poll_of_queues
from dispatcher.monitor.samples import HostReporting, MinuteSampling
from dispatcher.monitor.upkeep import Counting, DeliveryBackfill, OneTimeCodePruning, PruningService, RecipientSummaries
from dispatcher.providers.contract import PollableProvider
from dispatcher.providers.registry import class_of, open_provider
from dispatcher.store.alerts import AlertStore
from dispatcher.store.connections import Pool, make_pool
from dispatcher.store.retention import Retention
from dispatcher.telemetry import log, metric_files
from dispatcher.transport.signed_post import trusting_context

IDLE_MARGIN_SECONDS: Final = 30.0
"""One monitor sends the alerts of all hosts. If its database session is idle for longer than two probe intervals plus
this time, PostgreSQL ends the session, and another monitor sends the alerts."""


def run_monitor(settings: Settings, context: ChildContext) -> int:
    log.configure(settings.log_level, settings.log_format, worker="monitor")
    if settings.metrics:
        metric_files.begin(settings.metrics_folder, "monitor")
    uvloop.run(_monitor(settings, context))
    return 0


async def _monitor(settings: Settings, context: ChildContext) -> None:
    stop = stop_event(context)
    retention = Retention.of(settings)
    pool = make_pool(settings.database_url, name="dispatcher monitor", size=1)
    # The status pages have a session of their own, because a commit that hangs occupies the session of `pool`.
    pages_pool = make_pool(settings.database_url, name="dispatcher monitor", size=1)
    # Do not wait for a connection: the monitor must run and alert even while PostgreSQL is unreachable.
    await pool.open()
    await pages_pool.open()
    # This monitor's name, which stays the same after a restart. The name includes the run
    # directory, because several monitors may run on a host, each with its own run directory.
    holder = f"{settings.host_name}:{sha256(str(settings.run_dir).encode()).hexdigest()[:8]}"
    alert_store = AlertStore(
        settings.database_url,
        queue=settings.dlq,
        holder=holder,
        host=settings.host_name,
        retention=retention,
        idle_seconds=2 * settings.dlq_probe_seconds + IDLE_MARGIN_SECONDS,
    )
    slot = context.process_slot
    slot.mark_up()
    try:
        upkeep = [
            Periodic(OneTimeCodePruning(pool, retention)),
            Periodic(PruningService(settings.database_url, retention)),
            Periodic(RecipientSummaries(settings.database_url)),
            Periodic(DeliveryBackfill(pool)),
            Periodic(Counting(pool)),
        ]
        webhooks = WebhookDelivery(
            settings.database_url,
            allow_private=settings.webhooks_allow_private,
            context=trusting_context(settings.ca_file),
        )
        depth = depth_of_dlq(settings)
        alerting = [Periodic(DlqSweep(settings, depth)), *_alerting(settings, alert_store, depth)]
        queues, processes = poll_of_queues(settings), context.process_table
        named = {"holder": holder, "host": settings.host_name, "recipients": settings.recipients_digest}
        reporting = [
            Periodic(MinuteSampling(pool, settings, lambda: queues.found)),
            Periodic(HostReporting(pool, processes.statuses, slot.commit, **named)),
        ]
        pages = pages_of(settings, pages_pool, processes, queues)
        tasks = [*alerting, *upkeep, webhooks, *_event_sources(settings, pool), queues, *reporting, *pages]
        await run_tasks(tasks, stop, process="monitor")
    finally:
        await alert_store.leave()
        await pool.close()
        await pages_pool.close()
    log.get_log().info("monitor.stopped")


def _event_sources(settings: Settings, pool: Pool) -> Iterator[Task]:
    """The tasks that fetch providers' events. Imports only the code of the configured sources, because the import of
    the bounce parser takes 40 ms."""
    if settings.ses_events_queue_url:
        from dispatcher.events.sqs import QueuePolling

        yield QueuePolling(settings)
    if settings.bounce_maildir:
        from dispatcher.events.bounce_mailbox import BounceMailbox
        from dispatcher.events.maildir import Maildir
        from dispatcher.providers.smtp import SmtpSettings

        if address := settings.of(SmtpSettings).bounces():
            mailbox = Maildir(settings.bounce_maildir, keeps=settings.bounce_keep)
            intake = EventIntake(pool, suppression_rules(settings))
            yield Periodic(BounceMailbox(mailbox, address, pool, intake))
    for name in settings.providers:
        if hasattr(class_of(name), "find_event"):
            provider = open_provider(name, settings)
            assert isinstance(provider, PollableProvider)
            yield MessagePolling(settings.database_url, provider, EventIntake(pool, suppression_rules(settings)))


def _alerting(settings: Settings, store: AlertStore, depth: Depth) -> Sequence[Task]:
    """The tasks for alerts: one checks what can raise an alert, and one per channel sends the alerts."""
    state = AlertState(store)
    checks = AlertChecks(
        settings.dlq,
        depth,
        store,
        state,
        host=settings.host_name,
        interval_seconds=settings.dlq_probe_seconds,
        after_seconds=settings.alert_after_seconds,
        reminder_seconds=settings.alert_reminder_seconds,
        providers=settings.providers,
    )
    reminder_seconds = settings.alert_reminder_seconds
    senders = [
        AlertSender(channel, checks, state, reminder_seconds=reminder_seconds)
        for channel in (LogChannel(), *channels_of(settings))
    ]
    return [Periodic(checks), *senders]
