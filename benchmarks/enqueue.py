"""Measures how fast an API process and the library enqueue: `python benchmarks/enqueue.py --seconds 8 --repeat 3`.

There are five cases, which alternate over the repetitions, on the same private servers with full durability. 64 clients
post single emails, in one case with batching, in another without (one statement per request, the same handler). 8
clients post batches of 100. One application enqueues with the library, with 1 and with 500 emails per transaction.
PostgreSQL, RabbitMQ, the API and the clients share the machine; no worker runs. After each case, every accepted email
must be in the database.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/enqueue.py`

from benchmarks.capacity import server_pids
from benchmarks.cpu import read_cpu
from benchmarks.machine import machine
from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import connected
from dispatcher.store.migrations import migrate

HERE: Final = Path(__file__).resolve().parent
WARM_UP_SECONDS: Final = 1.0
PROCESSES: Final = ("api", "postgresql", "rabbitmq")


@dataclass(frozen=True, slots=True)
class Shape:
    """The load of a case.

    Attributes:
        clients: The number of the API's clients; 0 for the library.
        batch: Emails per request, or per transaction.
        insert_batch: The maximum number of emails per statement of the API.
    """

    name: str
    clients: int
    batch: int
    insert_batch: int = 256


SHAPES: Final = (
    Shape("64 clients, single, batched inserts", 64, 1),
    Shape("64 clients, single, one insert each", 64, 1, insert_batch=1),
    Shape("8 clients, batches of 100", 8, 100),
    Shape("library, enqueue", 0, 1),
    Shape("library, enqueue_many of 500", 0, 500),
)


def main() -> None:
    """The command line."""
    options = _options()
    shapes = [SHAPES[number - 1] for number in options.cases]
    results: list[tuple[Shape, dict[str, Any]]] = []
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
    ):
        for _ in range(options.repeat):
            for shape in shapes:
                results.append((shape, _measure(servers, shape, options.seconds)))
                console.log(f"{shape.name}: {results[-1][1]['emails_per_second']:,.0f} emails/s")
    if options.json:
        for shape, told in results:
            sys.stdout.write(json.dumps({**dataclasses.asdict(shape), **told, **machine()}) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 130).print(_table(shapes, results))
    if any(told["refused"] or told["missing"] for _, told in results):
        sys.exit("Emails were refused or are missing: see the columns refused and missing.")


def _measure(servers: Servers, shape: Shape, seconds: float) -> dict[str, Any]:
    with _place(servers) as environment, _api(environment, shape) as (port, api):
        roots = {**server_pids(servers), **api}
        _load(environment, shape, port, WARM_UP_SECONDS, "warm-up")
        before = read_cpu(roots)
        told = _load(environment, shape, port, seconds, "load")
        after = read_cpu(roots)
        emails = told["requests"] * shape.batch
        told["cpu_us"] = {name: 1e6 * (after.get(name, 0) - before.get(name, 0)) / emails for name in PROCESSES}
        with psycopg.connect(environment["DISPATCHER_DATABASE_URL"]) as connection:
            row = connection.execute(
                "select count(*) from dispatcher.email_log where message_key like 'load-%'"
            ).fetchone()
        assert row is not None
        return {**told, "missing": emails - row[0]}


@contextmanager
def _place(servers: Servers) -> Iterator[Mapping[str, str]]:
    """Create a database and queues for one case; yields the settings for them."""
    name = f"bench_{secrets.token_hex(4)}"
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq")
    asyncio.run(declare(servers.amqp_url, topology))
    database_url = urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{name}"))
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        with connected(database_url) as connection:
            migrate(connection)
        # Write the new database's dirty pages now, so that PostgreSQL does not write them during the measurement.
        administration.execute("checkpoint")
        yield {
            **os.environ,
            "DISPATCHER_DATABASE_URL": database_url,
            "DISPATCHER_AMQP_URL": servers.amqp_url,
            "DISPATCHER_EXCHANGE": topology.exchange,
            "DISPATCHER_QUEUE": topology.queue,
            "DISPATCHER_DLQ": topology.dlq,
            "DISPATCHER_LOG_FORMAT": "json",
        }
        administration.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@contextmanager
def _api(environment: Mapping[str, str], shape: Shape) -> Iterator[tuple[int, Mapping[str, int]]]:
    """Run the API; yields its port, and its process id by name. For the library there is no process."""
    if not shape.clients:
        yield 0, {}
        return
    more = {
        "DISPATCHER_API_ADDRESS": "127.0.0.1:0",
        "DISPATCHER_API_ALLOW_ANONYMOUS": "on",
        "DISPATCHER_API_INSERT_BATCH_EMAILS": str(shape.insert_batch),
    }
    command = [sys.executable, "-m", "dispatcher.cli.main", "api"]
    with subprocess.Popen(command, env={**environment, **more}, stdout=subprocess.PIPE) as api:
        assert api.stdout is not None
        try:
            yield int(json.loads(api.stdout.readline())["listener"].rpartition(":")[2]), {"api": api.pid}
        finally:
            api.terminate()


def _load(environment: Mapping[str, str], shape: Shape, port: int, seconds: float, name: str) -> dict[str, Any]:
    words = ["--batch", str(shape.batch), "--seconds", str(seconds), "--name", name]
    if shape.clients:
        words = ["http_load.py", "--port", str(port), "--clients", str(shape.clients), *words]
    else:
        words = ["library_load.py", *words]
    command = [sys.executable, str(HERE / words[0]), *words[1:]]
    done = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _table(shapes: list[Shape], results: list[tuple[Shape, dict[str, Any]]]) -> Table:
    table = Table(title="Emails accepted per second, median of the repetitions (lowest – highest); CPU in µs per email")
    columns = ("who", "emails/s", "range", "p50 ms", "p99 ms", *PROCESSES, "clients", "refused", "missing")
    for column in columns:
        table.add_column(column, justify="left" if column == "who" else "right")
    for shape in shapes:
        told = [each for asked, each in results if asked == shape]
        rates = [each["emails_per_second"] for each in told]
        table.add_row(
            shape.name,
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} – {max(rates):,.0f}",
            *(f"{statistics.median(each[name] for each in told):.1f}" for name in ("p50_ms", "p99_ms")),
            *(f"{statistics.median(each['cpu_us'][name] for each in told):.0f}" for name in PROCESSES),
            f"{statistics.median(1e6 * each['cpu_share'] / each['emails_per_second'] for each in told):.0f}",
            *(str(sum(each[name] for each in told)) for name in ("refused", "missing")),
        )
    return table


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/enqueue.py", description=summary, epilog=details)
    parser.add_argument("--seconds", type=float, default=8.0, metavar="N", help="per case; default: 8")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    numbers = range(1, len(SHAPES) + 1)
    about = "; ".join(f"{number}: {shape.name}" for number, shape in zip(numbers, SHAPES, strict=True))
    parser.add_argument("--cases", type=int, nargs="+", choices=numbers, default=list(numbers), help=about)
    parser.add_argument("--json", action="store_true", help="print one line per case and repetition")
    return parser.parse_args()


if __name__ == "__main__":
    main()
