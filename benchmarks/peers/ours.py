"""Ours, measured as the peers are: `dispatcher run` with two workers, attempt rows and metrics on.

Twice: `ours` has its whole way in the measured time, from the row that is due to the record; of `ours-published` the
messages wait on RabbitMQ before `dispatcher run` starts, as those of the peers with a broker do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import psycopg

from benchmarks.double import read_acceptances
from benchmarks.peers.measuring import Load, Measured, counted, ledger_of, server_pids, told, watch
from benchmarks.peers.processes import running
from benchmarks.peers.published import publish_all
from benchmarks.rig import Case, stage
from dispatcher.dev.servers import Servers

NAME: Final = "ours"
PUBLISHED: Final = "ours-published"
NAMES: Final = (NAME, PUBLISHED)
WORKERS: Final = 2
SETTLED: Final = (
    "select count(*), extract(epoch from max(sent_at))::float8 from email_log where status in ('sent', 'held')"
)
"""Held, too, is an end: after a kill, the email that was on the wire waits for a person."""


def measure_ours(name: str, servers: Servers, folder: Path, load: Load) -> Measured:
    """Run one case.

    Args:
        name: Which of the two.

    Raises:
        RuntimeError: it was not done in time, or could not be published before.
    """
    with stage(servers, Case("sendgrid", WORKERS, load.emails), folder) as scene:
        if name == PUBLISHED:
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
                raise RuntimeError(f"{name} {error}") from error
            rows = connection.execute("select email_id from email_log where status = 'held'").fetchall()
    acceptances = read_acceptances(ledger_of(folder))
    knobs = {"workers": WORKERS}
    held = frozenset(str(email_id) for (email_id,) in rows)
    return told(name, knobs, load, scene.enqueue_per_second, watched, scene.ids, acceptances, held)
