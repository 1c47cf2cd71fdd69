"""Our dispatcher, measured like the peers: `dispatcher run` with two workers, attempt rows and metrics on.

There are four cases: two with the defaults, as a new user runs the dispatcher, and two tuned, like the tuned peers. In
`ours` and `ours-tuned`, the measured time includes publishing. In `ours-published` and `ours-tuned-published`, the
messages are on RabbitMQ before `dispatcher run` starts, like the messages of the peers with a broker.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

from benchmarks.double import read_acceptances
from benchmarks.peers.measuring import Load, Measured, counted, ledger_of, result_of, server_pids, watch
from benchmarks.peers.processes import running
from benchmarks.peers.published import publish_all
from benchmarks.peers.roster import Knobs
from benchmarks.rig import Case, stage
from dispatcher import config
from dispatcher.dev.servers import Servers

WORKERS: Final = 2
TUNED: Final[Knobs] = {"bundle_emails": 16, "prefetch": 512}
"""The tuned settings, defined only here; `--sweep --peers ours-tuned,ours-tuned-published` tries different values."""
SETTLED: Final = """
    select count(*), extract(epoch from max(sent_at))::float8
    from dispatcher.email_log
    where status in ('sent', 'held')
"""
"""Counts held emails as finished: after a kill, an email that was on the wire waits for an operator."""


@dataclass(frozen=True, slots=True)
class Ours:
    """One way to measure our dispatcher.

    Attributes:
        is_published: The messages are on RabbitMQ before the clock starts.
        knobs: Settings, in lower case and without the prefix. All other settings have the default values.
        sweep: The values that `--sweep` tries.
    """

    name: str
    is_published: bool
    knobs: Knobs = field(default_factory=dict)
    sweep: tuple[Knobs, ...] = ()


_SWEEP: Final[tuple[Knobs, ...]] = tuple(
    {"bundle_emails": bundle, "prefetch": prefetch} for bundle in (1, 4, 16, 50) for prefetch in (256, 512, 1024)
)
OURS: Final = (
    Ours("ours", is_published=False),
    Ours("ours-published", is_published=True),
    Ours("ours-tuned", is_published=False, knobs=TUNED, sweep=_SWEEP),
    Ours("ours-tuned-published", is_published=True, knobs=TUNED, sweep=_SWEEP),
)
"""The cases, in the order of the table."""
NAMES: Final = tuple(case.name for case in OURS)


def counterparts(*, tuned: bool) -> tuple[str, str]:
    """The two cases of our dispatcher with which a stock or tuned peer is compared: without and with published
    messages."""
    meanwhile, published = (case.name for case in OURS if bool(case.knobs) == tuned)
    return meanwhile, published


def measure_ours(case: Ours, servers: Servers, folder: Path, load: Load, knobs: Knobs | None = None) -> Measured:
    """Run one case.

    Args:
        knobs: Overrides the case's settings.

    Raises:
        RuntimeError: The run did not finish in time, or the messages could not be published before the start.
    """
    knobs = case.knobs if knobs is None else knobs
    settings = tuple((f"DISPATCHER_{name.upper()}", str(value)) for name, value in knobs.items())
    with stage(servers, Case("sendgrid", WORKERS, load.emails, settings=settings), folder) as scene:
        if case.is_published:
            publish_all(scene.environment, load.emails)
        environment = {
            **scene.environment,
            "DISPATCHER_RUN_DIR": str(folder / "run"),
            "DISPATCHER_METRICS_ADDRESS": "127.0.0.1:0",
        }
        command = [sys.executable, "-m", "dispatcher.cli.main", "run"]
        with (
            psycopg.connect(scene.database_url, autocommit=True) as connection,
            running([command], environment, folder / "run.log") as programs,
        ):
            try:
                pids = server_pids(servers, scene.double.pid)
                watched = watch(programs, pids, ledger_of(folder), counted(connection, SETTLED), load)
            except TimeoutError as error:
                raise RuntimeError(f"{case.name} {error}") from error
            rows = connection.execute("select email_id from dispatcher.email_log where status = 'held'").fetchall()
    acceptances = read_acceptances(ledger_of(folder))
    in_effect = _in_effect(environment)
    held = frozenset(str(email_id) for (email_id,) in rows)
    return result_of(case.name, in_effect, load, scene.enqueue_per_second, watched, scene.ids, acceptances, held)


def _in_effect(environment: Mapping[str, str]) -> Knobs:
    """The knobs as the product reads them, including the defaults."""
    settings = config.load(environment)
    return {"workers": settings.workers, "bundle_emails": settings.bundle_emails, "prefetch": settings.prefetch}
