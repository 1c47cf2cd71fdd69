"""`dispatcher run`: checks settings and servers, imports the shared code, and becomes the parent of the processes."""

from __future__ import annotations

import gc
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.env_file import current_env_file
from dispatcher.cli.environment import RUN_NEEDS, load_settings, read_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.startup_errors import log_startup_errors
from dispatcher.config import Settings, every_setting, suspicious_settings

if TYPE_CHECKING:
    from dispatcher.supervisor.supervised import Role

_ONLY_AT_START: Final = (
    *("database_schema", "run_dir", "metrics", "metrics_dir", "host_name", "workers", "drain_seconds", "hang_seconds"),
)
"""Settings that a reload does not change: the parent uses them itself, or all its processes need the same value."""


class StopRequested(KeyboardInterrupt):
    """SIGTERM arrived before a process was started. Of the exceptions that a callback raises, asyncio passes on only
    KeyboardInterrupt and SystemExit."""


@click.command("run")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Number of worker processes.  [default: DISPATCHER_WORKERS]",
)
def command(workers: int | None) -> int:
    """Send enqueued emails: start this host's workers, relay and monitor, and keep them running.

    \b
    Examples:
      dispatcher run
      dispatcher run --workers 4
      dispatcher run --env-file /etc/email-dispatcher/dispatcher.env
      DISPATCHER_PROVIDERS=capture DISPATCHER_CAPTURE_DIR=mail dispatcher run

    Needs DISPATCHER_DATABASE_URL, DISPATCHER_AMQP_URL and DISPATCHER_PROVIDERS (with the providers' own settings). Run
    `dispatcher init` first. While PostgreSQL or RabbitMQ is unreachable, the command waits. If one of its processes
    exits or hangs, the command replaces the process.

    Workers send emails. The relay publishes due emails to RabbitMQ, and recovers the emails of workers that died. The
    monitor serves metrics and health checks, raises alerts, and deletes old data.

    \b
    Signals (send them to this process, not to its children):
      SIGTERM, Ctrl-C   Drain: finish and record the emails that are being transmitted,
                        release the leases of all other emails, then exit.
                        A second signal, at least one second later, makes all
                        processes exit immediately. Emails that were being
                        transmitted are then uncertain: they become held, or are
                        sent again (see DISPATCHER_ON_UNCERTAIN).
      SIGHUP            Read the env file and the files with secrets (DISPATCHER_…_FILE)
                        again, and replace every process, one after the other. Each
                        new worker starts before the old worker drains.
      SIGTTIN           Add a worker.
      SIGTTOU           Remove a worker.

    Exit codes: 0 all processes drained; 1 some processes had to be killed; 78 settings, tables or queues are invalid.
    """
    from dispatcher.supervisor.terminal import has_terminal

    # Until the parent handles these signals, they would end the process. With a controlling terminal, SIGHUP means that
    # the terminal closed.
    if not has_terminal():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU})
    with log_startup_errors():
        settings = load_settings(*RUN_NEEDS)
        signal.signal(signal.SIGTERM, _request_stop)
        try:
            return _run(replace(settings, workers=workers or settings.workers), workers)
        except StopRequested:
            return Exit.DONE


def _run(settings: Settings, workers: int | None) -> int:
    from setproctitle import setproctitle

    from dispatcher.supervisor.parent import Parent
    from dispatcher.supervisor.preflight import prepare
    from dispatcher.telemetry import log, tracing

    log.configure(settings.log_level, settings.log_format)
    setproctitle("dispatcher: run")
    for words in suspicious_settings(settings):
        log.get_log().warning("config.suspicious", reason=words)
    prepare(settings)
    tracing.prepare()
    roles = _roles(settings)
    # Without the freeze, the first collection would visit every object that the imports created.
    gc.freeze()
    gc.enable()
    return Parent(
        roles,
        run_dir=settings.run_dir,
        drain_seconds=settings.drain_seconds,
        hang_seconds=settings.hang_seconds,
        metrics_folder=settings.metrics_folder,
        counts=settings.metrics,
        load_roles=lambda: _roles(_load_again(settings, workers)),
    ).run()


def _load_again(settings: Settings, workers: int | None) -> Settings:
    """Reads the env file, the environment, and the files of secrets and certificates again. `_ONLY_AT_START` settings
    keep their values. If it raises ConfigurationError, the environment is unchanged."""
    from dispatcher.telemetry import log
    from dispatcher.transport.tls import http_context

    http_context.cache_clear()
    file = current_env_file()
    with file.read_again() if file else nullcontext():
        found = _with_metrics_dir(read_settings(*RUN_NEEDS))
    log.configure(found.log_level, found.log_format)
    kept = {name: getattr(_with_metrics_dir(settings), name) for name in _ONLY_AT_START}
    found = replace(found, workers=workers or found.workers)
    changed = [name for name in _ONLY_AT_START if getattr(found, name) != kept[name]]
    if changed:
        variables = [each.variable for each in every_setting() if each.name in changed]
        log.get_log().warning("config.restart_required", variables=variables)
    return replace(found, **kept)


def _with_metrics_dir(settings: Settings) -> Settings:
    """The settings with the folder in use as `metrics_dir`, also if no operator has set it."""
    return replace(settings, metrics_dir=settings.metrics_folder)


def _roles(settings: Settings) -> list[Role]:
    # Import these modules before the fork. All processes then share the modules' memory, which saves dozens of MB per
    # process.
    from dispatcher.store.connections import load_pools
    from dispatcher.supervisor.monitor_process import run_monitor
    from dispatcher.supervisor.relay_process import run_relay
    from dispatcher.supervisor.supervised import Role
    from dispatcher.worker.process import run_worker

    load_pools()
    # No other thread may run now: a lock that another thread holds at the fork stays locked in the child for ever.
    assert threading.active_count() == 1, f"threads before the fork: {threading.enumerate()}"
    return [
        Role("worker", partial(run_worker, settings), count=settings.workers),
        Role("relay", partial(run_relay, settings), stops_last=True),
        Role("monitor", partial(run_monitor, settings), stops_last=True),
    ]


def _request_stop(_number: int, _frame: FrameType | None) -> None:
    raise StopRequested
