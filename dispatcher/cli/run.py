"""`dispatcher run`: makes sure that the start can succeed, loads what the processes share, and becomes their parent."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.config import Settings

if TYPE_CHECKING:
    from dispatcher.supervisor.parent import Role


class StopRequested(BaseException):
    """SIGTERM before anything was started; nothing but the exit may catch it."""


@click.command("run")
@click.option(
    "--workers", type=click.IntRange(1, 256), metavar="N", help="Worker processes, instead of DISPATCHER_WORKERS."
)
def command(workers: int | None) -> int:
    """Send what is enqueued: starts the workers, the relay and the monitor of this host, and keeps them running.

    Needs DISPATCHER_DATABASE_URL, DISPATCHER_AMQP_URL and DISPATCHER_PROVIDERS (with what the provider needs), and an
    `init` before. While PostgreSQL or RabbitMQ is away it waits. SIGTERM and Ctrl-C drain: what is on the wire is
    finished and recorded, the rest is given back. A second SIGTERM ends at once.

    \b
    Examples:
      dispatcher run
      dispatcher run --workers 4
      DISPATCHER_PROVIDERS=capture DISPATCHER_CAPTURE_DIR=mail dispatcher run

    Exit codes: 0 drained, 1 processes had to be killed, 78 settings, tables or queues are not fit.
    """
    settings = load_settings("database_url", "amqp_url", "providers")
    if workers is not None:
        settings = replace(settings, workers=workers)
    signal.signal(signal.SIGTERM, _request_stop)
    try:
        return _run(settings)
    except StopRequested:
        return Exit.DONE


def _run(settings: Settings) -> int:
    """Becomes the parent once nothing stands in the way."""
    from setproctitle import setproctitle

    from dispatcher.supervisor.parent import Parent
    from dispatcher.supervisor.preflight import prepare
    from dispatcher.telemetry import log

    log.configure(settings.log_level, settings.log_format)
    setproctitle("dispatcher: run")
    prepare(settings)
    roles = _roles(settings)
    return Parent(
        roles,
        run_dir=settings.run_dir,
        drain_seconds=settings.drain_seconds,
        metrics_folder=settings.metrics_folder if settings.metrics else None,
    ).run()


def _roles(settings: Settings) -> list[Role]:
    # Loaded before the fork, so that all processes share the memory: several dozens of MB each otherwise.
    from dispatcher.monitor.process import run_monitor
    from dispatcher.relay.process import run_relay
    from dispatcher.supervisor.parent import Role
    from dispatcher.worker.process import run_worker

    # A lock that another thread holds at the fork would stay locked in the child for ever.
    assert threading.active_count() == 1, f"threads before the fork: {threading.enumerate()}"
    workers = [Role(f"worker {number}", partial(run_worker, settings, number)) for number in range(settings.workers)]
    relay = Role("relay", partial(run_relay, settings), stops_last=True)
    return [*workers, relay, Role("monitor", partial(run_monitor, settings), stops_last=True)]


def _request_stop(_number: int, _frame: FrameType | None) -> None:
    raise StopRequested
