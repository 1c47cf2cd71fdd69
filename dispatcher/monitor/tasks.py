"""What the monitor does, in one list."""

from __future__ import annotations

from hashlib import sha256

from dispatcher.alerts.channels import channels_of
from dispatcher.alerts.loglines import LogChannel
from dispatcher.config import Settings
from dispatcher.host.roster import Roster
from dispatcher.host.services import Periodic, Task
from dispatcher.maintenance.pruning import ForgetCodes, Prune
from dispatcher.monitor.announcing import Announcer
from dispatcher.monitor.pages import pages_of
from dispatcher.monitor.probe import probe_of
from dispatcher.monitor.toldbook import ToldBook
from dispatcher.monitor.watch import Watch
from dispatcher.store.alerts import AlertStore
from dispatcher.store.connections import Pool
from dispatcher.store.retention import Retention

HOLD_MARGIN_SECONDS = 30.0


def tasks_of(settings: Settings, pool: Pool, roster: Roster) -> list[Task]:
    """Everything that runs in this host's monitor.

    Args:
        pool: The monitor's few sessions; it may never have reached PostgreSQL.
        roster: Who of this host's processes is there, and how he is.
    """
    retention = Retention.of(settings)
    pruning = [Periodic(ForgetCodes(pool, retention)), Periodic(Prune(settings.database_url, retention))]
    return [*_alerting(settings, pool, retention), *pruning, *pages_of(settings, pool, roster)]


def _alerting(settings: Settings, pool: Pool, retention: Retention) -> list[Task]:
    """The watch over the DLQ, and a task per channel; our own log is one."""
    host = settings.host_name
    store = AlertStore(pool, queue=settings.dlq, holder=_holder(settings, host), host=host, retention=retention)
    book = ToldBook(store, hold_seconds=2 * settings.dlq_probe_seconds + HOLD_MARGIN_SECONDS)
    interval_seconds = settings.dlq_probe_seconds
    watch = Watch(
        settings.dlq,
        probe_of(settings),
        store,
        book,
        host=host,
        interval_seconds=interval_seconds,
        after_seconds=settings.alert_after_seconds,
        providers=settings.providers,
    )
    channels = [LogChannel(), *channels_of(settings)]
    reminder_seconds = settings.alert_reminder_seconds
    return [watch, *[Announcer(channel, watch, book, reminder_seconds=reminder_seconds) for channel in channels]]


def _holder(settings: Settings, host: str) -> str:
    """This monitor's name, the same over restarts: a host may have several run directories."""
    return f"{host}:{sha256(str(settings.run_dir).encode()).hexdigest()[:8]}"
