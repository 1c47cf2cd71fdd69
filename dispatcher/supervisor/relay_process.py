"""The relay process: recovers the emails of its host's dead or frozen workers, and publishes while it is the leader."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

import uvloop

from dispatcher.broker.publisher import WINDOW, Publisher
from dispatcher.config import Settings
from dispatcher.errors import StoreUnavailable
from dispatcher.events.intake import ProvenEmails
from dispatcher.host.lifecycle import set_on_signals, stop_event
from dispatcher.host.process_table import ChildContext
from dispatcher.host.services import Periodic, run_tasks
from dispatcher.monitor.upkeep import Partitions
from dispatcher.recovery.ledgers import LedgerRecovery
from dispatcher.recovery.lost_commits import LostCommits
from dispatcher.recovery.lost_host import LostHosts
from dispatcher.recovery.lost_message import LostMessages
from dispatcher.relay.publish_loop import LeaderServices, PublishLoop
from dispatcher.relay.timing import ExpiredEmails, WaitingEmails
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from dispatcher.store.outbox import Outbox
from dispatcher.telemetry import log, metric_files

LAST_ROUND_SECONDS: Final = 3.0
"""The time limit of the relay's last round, which publishes emails that the exiting workers made due. The next leading
relay publishes the rest."""
CLOSE_SECONDS: Final = 1.0
"""The longest wait for the connection to close, in case RabbitMQ hangs. No email is lost if the relay waits no longer:
each email's message is confirmed, or the email is still due."""


def run_relay(settings: Settings, context: ChildContext) -> int:
    log.configure(settings.log_level, settings.log_format, worker="relay")
    if settings.metrics:
        metric_files.begin(settings.metrics_folder, "relay")
    uvloop.run(_relay(settings, context))
    return 0


def leader_services(
    settings: Settings, publisher: Publisher, workers_here: Callable[[], Collection[str] | None]
) -> Callable[[Outbox], LeaderServices]:
    return lambda outbox: LeaderServices(
        by_time=(
            LostCommits(outbox),
            LostHosts(settings, outbox, workers_here),
            LostMessages(settings, outbox, publisher.find),
        ),
        by_due_rows=(ProvenEmails(outbox), ExpiredEmails(outbox), WaitingEmails(outbox)),
    )


async def _relay(settings: Settings, context: ChildContext) -> None:
    stop = stop_event(context)
    pool = make_pool(settings.database_url, name="dispatcher relay settlement", size=1, lock_seconds=BATCH_LOCK_SECONDS)
    await pool.open()
    name = f"dispatcher relay {settings.host_name}:{os.getpid()}"
    # The window limits the unconfirmed messages of all lanes together. It grows with the number of lanes. So if
    # RabbitMQ confirms no message of one lane, the window still has room for the other lanes.
    window = WINDOW * len(settings.lanes)
    publisher = Publisher(settings.amqp_url, settings.exchange, name=name, ca_file=settings.ca_file, window=window)
    ledgers = LedgerRecovery(settings, pool)
    publishing = PublishLoop(
        settings, publisher, leader_services(settings, publisher, lambda: ledgers.workers_here), context.process_slot
    )
    services = [Periodic(ledgers), Periodic(Partitions(pool))]
    set_on_signals(services[0].woken, signal.SIGURG)  # the parent has reaped a process
    publishes = asyncio.create_task(publishing.run())
    stopped = asyncio.create_task(run_tasks(services, stop, process="relay"))
    context.process_slot.mark_up()
    try:
        ended, _ = await asyncio.wait([stopped, publishes], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_ROUND_SECONDS):
                with suppress(StoreUnavailable):
                    await ledgers.run_once()
                publishing.stop()
                await publishes
    finally:
        for task in (stopped, publishes):
            task.cancel()
        await asyncio.gather(stopped, publishes, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await publisher.close()
        await pool.close()
    log.get_log().info("relay.stopped")
