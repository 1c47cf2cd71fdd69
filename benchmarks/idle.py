"""Measures what a `dispatcher run` costs while it is idle, and in a trickle: `python benchmarks/idle.py`.

For each rate (0 is idle), the command shows the CPU milliseconds per second of each kind of process, the wake-ups per
second, and the SQL statements per second. The CPU of PostgreSQL and RabbitMQ also contains what they use without a
dispatcher; the first row shows this part. Other load on the machine raises all figures, so compare figures of one call.

It takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/idle.py`

from benchmarks.cpu import PROC, children_of, role_of
from benchmarks.machine import described, machine, versions
from benchmarks.rig import Case, Stage, bare_stage, database, drafts, wait_until
from benchmarks.run import WIDTH
from benchmarks.statements import preload_settings
from dispatcher import enqueue
from dispatcher.dev.servers import Servers, private_servers, status

NAME: Final = "idle.jsonl"
LONGEST_SECONDS: Final = 120.0
"""The longest wait until `dispatcher run` has sent the first email."""
SETTLE_SECONDS: Final = 10.0
"""Not counted, because a process does some work only after its start."""
KINDS: Final = ("parent", "relay", "worker", "monitor", "postgresql", "rabbitmq")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one second costs.

    Attributes:
        rate: Emails per second; None without a dispatcher.
        cpu_ms: By kind of process.
        wakeups: How often a process of this kind waited for something and was woken.
    """

    rate: float | None
    cpu_ms: Mapping[str, float]
    wakeups: Mapping[str, float]
    statements: float


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(
            Path(folder) / "servers", progress=console.log, postgres_settings=preload_settings()
        ) as servers,
    ):
        facts = {**machine(), **versions(servers)}
        costs = [_without_dispatcher(servers, options.seconds)]
        for rate in options.rates:
            with (
                database(servers) as url,
                bare_stage(servers, Case("sendgrid", 2, 0), Path(folder) / f"{rate:g}", url) as scene,
                scene.running("run") as pid,
            ):
                costs.append(_measure(servers, scene, pid, rate, options.seconds))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({**asdict(cost), "machine": facts}) + "\n" for cost in costs]
        (options.out / NAME).write_text("".join(lines))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(costs), described(facts))


def table(costs: list[Cost]) -> Table:
    """A row for each rate."""
    shown = Table("emails per second", title="CPU milliseconds per second (wake-ups per second)")
    for kind in KINDS:
        shown.add_column(kind, justify="right")
    for heading in ("sum", "statements per second"):
        shown.add_column(heading, justify="right")
    for cost in costs:
        cells = [f"{cost.cpu_ms.get(kind, 0):.1f} ({cost.wakeups.get(kind, 0):.0f})" for kind in KINDS]
        name = "no dispatcher" if cost.rate is None else f"{cost.rate:g}"
        shown.add_row(name, *cells, f"{sum(cost.cpu_ms.values()):.1f}", f"{cost.statements:.1f}")
    return shown


def _without_dispatcher(servers: Servers, seconds: float) -> Cost:
    before = _read(servers, None)
    time.sleep(seconds)
    return _cost(None, before, _read(servers, None), seconds, 0.0)


def _measure(servers: Servers, scene: Stage, pid: int, rate: float, seconds: float) -> Cost:
    with psycopg.connect(scene.database_url, autocommit=True) as connection:
        unsent = "select from dispatcher.email_log where status in ('pending', 'sending') limit 1"
        enqueue(connection, *drafts(1, "first"))
        wait_until(lambda: not connection.execute(unsent).fetchall(), LONGEST_SECONDS)
        _send(connection, rate, SETTLE_SECONDS, "settle")
        before, statements = _read(servers, pid), _statements(servers, scene)
        began = time.monotonic()
        _send(connection, rate, seconds, "counted")
        elapsed = time.monotonic() - began
        after = _read(servers, pid)
        executed = (_statements(servers, scene) - statements) / elapsed
    return _cost(rate, before, after, elapsed, executed)


def _send(connection: psycopg.Connection[tuple[object, ...]], rate: float, seconds: float, prefix: str) -> None:
    """Enqueues emails at a steady rate; the statements of this client are counted, too."""
    began = time.monotonic()
    for number, email in enumerate(drafts(int(rate * seconds), prefix)):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        enqueue(connection, email)
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def _statements(servers: Servers, scene: Stage) -> float:
    """How many statements the database of this case has executed, without transaction control."""
    name = scene.database_url.rpartition("/")[2].partition("?")[0]
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        row = connection.execute(
            "select coalesce(sum(calls), 0)::float8 from pg_stat_statements join pg_database as d on d.oid = dbid"
            " where d.datname = %s and query !~* '^(begin|commit|rollback|savepoint|release)'",
            (name,),
        ).fetchone()
    assert row is not None
    return float(row[0])


Reading = dict[int, tuple[str, float, int]]
"""By process: the kind, the CPU in milliseconds, and the wake-ups."""


def _read(servers: Servers, run_pid: int | None) -> Reading:
    pids = status(servers.folder).pids
    roots = {"postgresql": pids["postgres"], "rabbitmq": pids["rabbitmq"]}
    reading = {pid: (kind, *_used(pid)) for kind, root in roots.items() for pid in _tree(root)}
    if run_pid is not None:
        reading[run_pid] = ("parent", *_used(run_pid))
        reading |= {pid: (role_of(pid), *_used(pid)) for pid in children_of(run_pid)}
    return reading


def _tree(pid: int) -> list[int]:
    return [pid, *(each for child in children_of(pid) for each in _tree(child))]


def _used(pid: int) -> tuple[float, int]:
    """The CPU in milliseconds, to the nanosecond, and the wake-ups of all threads of a process."""
    milliseconds, wakeups = 0.0, 0
    try:
        for thread in (PROC / str(pid) / "task").iterdir():
            milliseconds += int((thread / "schedstat").read_text().split()[0]) / 1e6
            (line,) = (
                each for each in (thread / "status").read_text().splitlines() if each.startswith("voluntary_ctxt")
            )
            wakeups += int(line.split()[1])
    except OSError:
        pass  # the thread or process has ended
    return milliseconds, wakeups


def _cost(rate: float | None, before: Reading, after: Reading, seconds: float, statements: float) -> Cost:
    cpu_ms, wakeups = Counter[str](), Counter[str]()
    for pid, (kind, milliseconds, woken) in after.items():
        _, earlier_ms, earlier = before.get(pid, ("", 0.0, 0))
        cpu_ms[kind] += (milliseconds - earlier_ms) / seconds  # type: ignore[assignment]  # a Counter of floats
        wakeups[kind] += (woken - earlier) / seconds  # type: ignore[assignment]
    return Cost(rate, dict(cpu_ms), dict(wakeups), statements)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 10.0, 100.0], help="emails per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rate")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the raw figures to FOLDER")
    return parser.parse_args()


if __name__ == "__main__":
    main()
