"""`dispatcher run`: makes sure that the start can succeed, loads what the processes share, and becomes their parent."""

from __future__ import annotations

import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.env_file import current_env_file
from dispatcher.cli.environment import load_settings, read_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.starting import starting
from dispatcher.config import Settings, every_setting, suspicious_settings

if TYPE_CHECKING:
    from dispatcher.supervisor.supervised import Role

_NEEDED: Final = ("database_url", "amqp_url", "providers")
_ONLY_AT_START: Final = (
    "database_schema",
    "run_dir",
    "metrics",
    "metrics_dir",
    "host_name",
    "workers",
    "drain_seconds",
    "hang_seconds",
)
"""Settings that the parent uses itself, or that must be the same in all its processes during a reload."""


class StopRequested(BaseException):
    """SIGTERM before anything was started; nothing but the exit may catch it."""


@click.command("run")
@click.option(
    "--workers", type=click.IntRange(1, 256), metavar="N", help="Worker processes, instead of DISPATCHER_WORKERS."
)
def command(workers: int | None) -> int:
    """Send what is enqueued: starts the workers, the relay and the monitor of this host, and keeps them running.

    Needs DISPATCHER_DATABASE_URL, DISPATCHER_AMQP_URL and DISPATCHER_PROVIDERS (with what the provider needs), and an
    `init` before. While PostgreSQL or RabbitMQ is away it waits. Processes that end or hang are replaced.

    \b
    Signals, to this process alone:
      SIGTERM, Ctrl-C   Drain: what is on the wire is finished and recorded, the
                        rest is given back. Once more, a second later or more:
                        end at once. (What was on the wire is then held.)
      SIGHUP            Read the env file and the *_FILE secrets again, and replace
                        every process, one by one: a successor works before a
                        worker drains.
      SIGTTIN, SIGTTOU  One worker more, one less.

    \b
    Examples:
      dispatcher run
      dispatcher run --workers 4
      dispatcher run --env-file /etc/email-dispatcher/dispatcher.env
      DISPATCHER_PROVIDERS=capture DISPATCHER_CAPTURE_DIR=mail dispatcher run

    Exit codes: 0 drained, 1 processes had to be killed, 78 settings, tables or queues are not fit.
    """
    _put_off_reloads()
    with starting():
        settings = load_settings(*_NEEDED)
        signal.signal(signal.SIGTERM, _request_stop)
        try:
            return _run(replace(settings, workers=workers or settings.workers), workers)
        except StopRequested:
            return Exit.DONE


def _put_off_reloads() -> None:
    """One that comes while we start would end us; it is heard once there is something to reload or to scale.

    Where there is a terminal, SIGHUP says that it was closed, and that is the end.
    """
    from dispatcher.supervisor.terminal import has_terminal

    if not has_terminal():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU})


def _run(settings: Settings, workers: int | None) -> int:
    """Becomes the parent once nothing stands in the way."""
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
    parent = Parent(
        _roles(settings),
        run_dir=settings.run_dir,
        drain_seconds=settings.drain_seconds,
        hang_seconds=settings.hang_seconds,
        metrics_folder=settings.metrics_folder,
        counts=settings.metrics,
        load_roles=lambda: _roles(_load_again(settings, workers)),
    )
    return parent.run()


def _load_again(settings: Settings, workers: int | None) -> Settings:
    """Reads the env file, the environment and the secrets' files again; `_ONLY_AT_START` keeps the values of the start.

    Raises:
        ConfigurationError: there are mistakes; the environment is unchanged.
    """
    from dispatcher.telemetry import log

    file = current_env_file()
    with file.read_again() if file else nullcontext():
        found = _with_metrics_dir(read_settings(*_NEEDED))
    log.configure(found.log_level, found.log_format)
    kept = {name: getattr(_with_metrics_dir(settings), name) for name in _ONLY_AT_START}
    found = replace(found, workers=workers or found.workers)
    changed = [name for name in _ONLY_AT_START if getattr(found, name) != kept[name]]
    if changed:
        variables = [each.variable for each in every_setting() if each.name in changed]
        log.get_log().warning("config.restart_required", variables=variables)
    return replace(found, **kept)


def _with_metrics_dir(settings: Settings) -> Settings:
    """Sets `metrics_dir` to the folder in use. The metrics library needs it in the environment, which changes it."""
    return replace(settings, metrics_dir=settings.metrics_folder)


def _roles(settings: Settings) -> list[Role]:
    # Loaded before the fork, so that all processes share the memory: several dozens of MB each otherwise.
    from dispatcher.processes.monitor import run_monitor
    from dispatcher.processes.relay import run_relay
    from dispatcher.supervisor.supervised import Role
    from dispatcher.worker.process import run_worker

    # A lock that another thread holds at the fork would stay locked in the child for ever.
    assert threading.active_count() == 1, f"threads before the fork: {threading.enumerate()}"
    return [
        Role("worker", partial(run_worker, settings), count=settings.workers),
        Role("relay", partial(run_relay, settings), stops_last=True),
        Role("monitor", partial(run_monitor, settings), stops_last=True),
    ]


def _request_stop(_number: int, _frame: FrameType | None) -> None:
    raise StopRequested
