"""Measures how many transactions per second can enqueue: `TMPDIR=/tmp python benchmarks/commits.py`.

Each connection inserts an order, enqueues one email and commits, again and again. In one case, commits notify the
relay; in the other case, they do not. `commit_delay` makes a commit take as long as one on a network disk or with a
synchronous standby.

Before, the command measures a trickle: how long a `dispatcher run` takes to send an email that is enqueued while
nothing else happens.

The servers' data must be on a disk, so TMPDIR must not be in memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/commits.py`

from benchmarks.figures import percentile
from benchmarks.rig import Case, bare_stage, database
from dispatcher import Email, enqueue
from dispatcher.dev.servers import Servers, private_servers

PROCESSES: Final = 2
TRICKLE_SECONDS: Final = 0.5
SETTLE_SECONDS: Final = 3.0
READY_SECONDS: Final = 60.0


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
    ):
        times_ms = _trickle(servers, Path(folder) / "trickle", options.emails)
        table = Table("commit_delay, ms", "connections", "commits/s, notifying", "commits/s, without", "ratio")
        for delay_ms in options.delays_ms:
            _set_delay(servers, delay_ms)
            for connections in options.connections:
                figures: dict[bool, list[float]] = {True: [], False: []}
                for _ in range(options.repeat):
                    for is_on, rates in figures.items():
                        rates.append(_measure(servers, connections, options.seconds, is_on=is_on))
                with_it, without = statistics.median(figures[True]), statistics.median(figures[False])
                cells = f"{delay_ms:g}", str(connections), f"{with_it:,.0f}", f"{without:,.0f}"
                table.add_row(*cells, f"{without / with_it:.1f}")
                console.log(*cells)
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    print(f"trickle: {len(times_ms)} emails, p50 {percentile(times_ms, 50):.0f} ms, longest {times_ms[-1]:.0f} ms")


def _set_delay(servers: Servers, delay_ms: float) -> None:
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        # Without this, a transaction that commits alone does not wait.
        connection.execute("alter system set commit_siblings = 0")
        connection.execute(f"alter system set commit_delay = {round(1000 * delay_ms)}".encode())
        connection.execute("select pg_reload_conf()")


def _measure(servers: Servers, connections: int, seconds: float, *, is_on: bool) -> float:
    """The commits per second of all connections together."""
    with database(servers) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("create table orders (order_id bigint generated always as identity, note text)")
            connection.execute("update dispatcher.due_notification set is_on = %s", [is_on])
        processes = min(PROCESSES, connections)
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            began_at = time.time() + 1.0 + connections / 20
            share = connections // processes
            work = [(url, number, share, began_at, seconds) for number in range(processes)]
            return sum(pool.starmap(_commit, work)) / seconds


def _commit(url: str, number: int, connections: int, began_at: float, seconds: float) -> int:
    """The commits of one process."""

    def run(place: int) -> int:
        with psycopg.connect(url) as connection:
            if time.time() > began_at:
                sys.exit("The machine is too busy: a connection opened only after the load had begun.")
            time.sleep(began_at - time.time())
            count = 0
            while time.time() < began_at + seconds:
                connection.execute("insert into orders (note) values ('paid')")
                enqueue(connection, _email(f"{number}-{place}-{count}"))
                connection.commit()
                count += 1
            return count

    with ThreadPoolExecutor(connections) as threads:
        return sum(threads.map(run, range(connections)))


def _trickle(servers: Servers, folder: Path, emails: int) -> list[float]:
    """The milliseconds from each commit until the email is sent."""
    times_ms = []
    with (
        database(servers) as url,
        bare_stage(servers, Case("sendgrid", 1, emails), folder, url) as scene,
        scene.running("run"),
        psycopg.connect(url, autocommit=True) as connection,
    ):
        _send(connection, "first")
        time.sleep(SETTLE_SECONDS)
        for number in range(emails):
            times_ms.append(1000 * _send(connection, f"trickle-{number}"))
            time.sleep(TRICKLE_SECONDS)
    return sorted(times_ms)


def _send(connection: psycopg.Connection, key: str) -> float:
    began_at = time.monotonic()
    answer = enqueue(connection, _email(key))
    statement = "select status from dispatcher.email_log where email_id = %s"
    while time.monotonic() < began_at + READY_SECONDS:
        if connection.execute(statement, [answer.email_id]).fetchone() == ("sent",):
            return time.monotonic() - began_at
        time.sleep(0.002)
    sys.exit(f"The email {key} was not sent within {READY_SECONDS:g} seconds.")


def _email(key: str) -> Email:
    return Email(message_key=key, sender="a@example.com", to="b@example.org", subject="Your order", text="Thank you.")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 2.5, 25.0], help="commit_delay")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--emails", type=int, default=20, help="of the trickle")
    return parser.parse_args()


if __name__ == "__main__":
    main()
