"""What one API process accepts: `python benchmarks/enqueue.py --seconds 8 --repeat 3`.

Three cases, interleaved over the repetitions, on the same private servers with all durability on: 64 clients that post
single emails, with gathering and without it (one statement per request, the same handler), and 8 clients that post
batches of 100. PostgreSQL, RabbitMQ, the API and the clients share the machine; no worker runs. The books are closed
after each case: every answer's email is in the database.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/enqueue.py`

from benchmarks.machine import machine
from benchmarks.rig import Case, Stage, stage
from dispatcher.dev.servers import private_servers

LOAD: Final = str(Path(__file__).resolve().parent / "http_load.py")


@dataclass(frozen=True, slots=True)
class Shape:
    """How clients post.

    Attributes:
        gathered: Emails per statement, at most.
    """

    name: str
    clients: int
    batch: int
    gathered: int


SHAPES: Final = (
    Shape("single, gathered", 64, 1, 256),
    Shape("single, not gathered", 64, 1, 1),
    Shape("batches of 100", 8, 100, 256),
)


def main() -> None:
    """The command line."""
    options = _options()
    results: list[tuple[Shape, dict[str, Any]]] = []
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
    ):
        for repetition in range(options.repeat):
            for number, shape in enumerate(SHAPES):
                place = Path(folder) / f"case-{repetition}-{number}"
                with stage(servers, Case("capture", 1, 1), place) as scene:
                    results.append((shape, _measure(scene, shape, options.seconds)))
                    console.log(f"{shape.name}: {results[-1][1]['emails_per_second']:,.0f} emails/s")
    if options.json:
        for shape, told in results:
            sys.stdout.write(json.dumps({**dataclasses.asdict(shape), **told, **machine()}) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 110).print(_table(results))
    if any(told["refused"] or told["missing"] for _, told in results):
        sys.exit("The books do not balance: see refused and missing.")


def _measure(scene: Stage, shape: Shape, seconds: float) -> dict[str, Any]:
    with _api(scene.environment, shape) as (port, pid):
        _load(port, shape, 1.0, "warm-up")
        before = _cpu_seconds(pid)
        told = _load(port, shape, seconds, "load")
        told["api_cpu_us"] = 1e6 * (_cpu_seconds(pid) - before) / (told["requests"] * shape.batch)
    with psycopg.connect(scene.database_url) as connection:
        row = connection.execute("select count(*) from email_log where message_key like 'load-%'").fetchone()
    assert row is not None
    return {**told, "missing": told["requests"] * shape.batch - row[0]}


@contextmanager
def _api(environment: Mapping[str, str], shape: Shape) -> Iterator[tuple[int, int]]:
    more = {"DISPATCHER_API_ADDRESS": "127.0.0.1:0", "DISPATCHER_API_GATHERED_EMAILS": str(shape.gathered)}
    command = [sys.executable, "-m", "dispatcher.cli.main", "api"]
    with subprocess.Popen(command, env={**environment, **more}, stdout=subprocess.PIPE) as api:
        assert api.stdout is not None
        try:
            yield int(json.loads(api.stdout.readline())["listener"].rpartition(":")[2]), api.pid
        finally:
            api.terminate()


def _cpu_seconds(pid: int) -> float:
    """What a process has used: a figure that a busy machine changes little."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _load(port: int, shape: Shape, seconds: float, name: str) -> dict[str, Any]:
    words = ["--port", str(port), "--clients", str(shape.clients), "--batch", str(shape.batch)]
    words += ["--seconds", str(seconds), "--name", name]
    done = subprocess.run([sys.executable, LOAD, *words], stdout=subprocess.PIPE, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _table(results: list[tuple[Shape, dict[str, Any]]]) -> Table:
    table = Table(title="Emails accepted per second by one API process, median of the repetitions (lowest – highest)")
    for heading in (
        "clients",
        "emails/s",
        "range",
        "p50 ms",
        "p99 ms",
        "API's CPU µs",
        "clients' CPU",
        "refused",
        "missing",
    ):
        table.add_column(heading, justify="left" if heading == "clients" else "right")
    for shape in SHAPES:
        told = [each for asked, each in results if asked == shape]
        rates = [each["emails_per_second"] for each in told]
        table.add_row(
            f"{shape.clients} × {shape.name}",
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} – {max(rates):,.0f}",
            *(f"{statistics.median(each[name] for each in told):.1f}" for name in ("p50_ms", "p99_ms", "api_cpu_us")),
            f"{statistics.median(each['cpu_share'] for each in told):.0%}",
            *(str(sum(each[name] for each in told)) for name in ("refused", "missing")),
        )
    return table


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/enqueue.py", description=summary, epilog=details)
    parser.add_argument("--seconds", type=float, default=8.0, metavar="N", help="per case; default: 8")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--json", action="store_true", help="one line per case and repetition")
    return parser.parse_args()


if __name__ == "__main__":
    main()
