"""Measures how many transactions per second can enqueue: `TMPDIR=/tmp python benchmarks/commits.py`.

`dispatcher run` sends through the SendGrid double. Each connection of the application inserts an order, enqueues one
email and commits, again and again. Three statements alternate: the product's, the same without the notification of the
relay, and the same with a notification in each transaction. After each load, the command waits until all emails are
sent. `commit_delay` makes a commit take as long as one on a network disk or with a synchronous standby.

Before and directly after the loads, the command measures a trickle: the time from the beginning of a transaction until
the provider has accepted its email, at a steady rate.

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
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/commits.py`

from benchmarks.figures import latencies_ms, percentile
from benchmarks.rig import Case, Stage, bare_stage, database, wait_until
from dispatcher import Email, enqueue
from dispatcher.dev.servers import Servers, private_servers

PROCESSES: Final = 2
TRICKLE_CONNECTIONS: Final = 4
WARM_UP_SECONDS: Final = 4.0
"""Not counted. The relay measures the load once per second."""
LONGEST_SECONDS: Final = 300.0
"""The longest wait until `dispatcher run` has started, or until it has sent the emails of a load."""
_NOTIFY: Final = b"then pg_notify('email_dispatcher_due'::text, ''::text)"
STATEMENTS: Final[dict[str, tuple[bytes, bytes]]] = {
    "as it is": (b"", b""),
    "without notification": (_NOTIFY, b"then null"),
    "always notifying": (b" and not exists (select from dispatcher.relay_polls)", b""),
}
"""By name: what is replaced in the product's statement, and by what."""


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    loads = Table("commit_delay, ms", "connections", *(f"commits/s, {name}" for name in STATEMENTS), "ratio")
    trickles = Table("commit_delay, ms", "trickle", "emails", "p50, ms", "p99, ms", "longest, ms")
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
    ):
        for delay_ms in options.delays_ms:
            _set_delay(servers, delay_ms)
            with (
                database(servers) as url,
                bare_stage(servers, Case("sendgrid", 1, 0), Path(folder) / f"{delay_ms:g}", url) as scene,
                scene.running("run"),
            ):
                _start(scene)
                trickle = partial(_trickle, scene, options.rate, options.trickle_seconds)
                before_ms = trickle("before")
                for connections in options.connections:
                    rates: dict[str, list[float]] = {name: [] for name in STATEMENTS}
                    for _ in range(options.repeat):
                        for name, found in rates.items():
                            found.append(_load(scene, name, connections, options.seconds))
                    medians = [statistics.median(found) for found in rates.values()]
                    cells = f"{delay_ms:g}", str(connections), *(f"{each:,.0f}" for each in medians)
                    loads.add_row(*cells, f"{medians[0] / medians[1]:.2f}")
                    console.log(*cells)
                for name, times_ms in {"before the loads": before_ms, "after the loads": trickle("after")}.items():
                    figures = percentile(times_ms, 50), percentile(times_ms, 99), times_ms[-1]
                    cells = f"{delay_ms:g}", name, str(len(times_ms)), *(f"{each:.1f}" for each in figures)
                    trickles.add_row(*cells)
                    console.log(*cells)
    page = Console(width=None if sys.stdout.isatty() else 130)
    page.print(loads, trickles)


def _set_delay(servers: Servers, delay_ms: float) -> None:
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        # Without this, a transaction that commits alone does not wait.
        connection.execute("alter system set commit_siblings = 0")
        connection.execute(f"alter system set commit_delay = {round(1000 * delay_ms)}".encode())
        connection.execute("select pg_reload_conf()")


def _start(scene: Stage) -> None:
    """Waits until `dispatcher run` has sent an email, so that no figure contains its start."""
    with psycopg.connect(scene.database_url, autocommit=True) as connection:
        connection.execute("create table orders (order_id bigint generated always as identity, note text)")
        enqueue(connection, _email("first"))
    _await_sent(scene)


def _trickle(scene: Stage, rate: float, seconds: float, name: str) -> list[float]:
    """The milliseconds from the beginning of each transaction until the provider has accepted the email, ascending."""
    began_at: dict[str, float] = {}

    def run(place: int) -> None:
        with psycopg.connect(scene.database_url) as connection:
            for number in range(place, int(rate * seconds), TRICKLE_CONNECTIONS):
                time.sleep(max(0.0, start_at + number / rate - time.time()))
                at = time.time()
                answer = enqueue(connection, _email(f"{name}-{number}"))
                connection.commit()
                began_at[str(answer.email_id)] = at

    start_at = time.time() + 1.0
    with ThreadPoolExecutor(TRICKLE_CONNECTIONS) as threads:
        list(threads.map(run, range(TRICKLE_CONNECTIONS)))
    wait_until(lambda: began_at.keys() <= scene.double.acceptances().keys(), LONGEST_SECONDS)
    return latencies_ms(began_at, scene.double.acceptances())


def _load(scene: Stage, statement: str, connections: int, seconds: float) -> float:
    """The commits per second of all connections together."""
    processes = min(PROCESSES, connections)
    counted_at = time.time() + 1.0 + connections / 20 + WARM_UP_SECONDS
    commit = partial(_commit, scene.database_url, statement, connections // processes, counted_at, seconds)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        rate = sum(pool.map(commit, range(processes))) / seconds
    _await_sent(scene)
    return rate


def _commit(url: str, statement: str, connections: int, counted_at: float, seconds: float, process: int) -> int:
    """The commits of one process from `counted_at` on."""

    def run(place: int) -> int:
        with psycopg.connect(url, cursor_factory=_cursor_of(statement)) as connection:
            if time.time() > counted_at:
                sys.exit("The machine is too busy: a connection opened only after the load had begun.")
            total = counted = 0
            while (now := time.time()) < counted_at + seconds:
                connection.execute("insert into orders (note) values ('paid')")
                enqueue(connection, _email(f"{statement}-{counted_at}-{process}-{place}-{total}"))
                connection.commit()
                total += 1
                counted += now >= counted_at
            return counted

    with ThreadPoolExecutor(connections) as threads:
        return sum(threads.map(run, range(connections)))


def _cursor_of(statement: str) -> type[psycopg.Cursor[Any]]:
    """A class of cursors that change the product's statement."""
    old, new = STATEMENTS[statement]

    class ChangingCursor(psycopg.Cursor[Any]):
        def execute(self, query: Any, *arguments: Any, **named: Any) -> Any:
            return super().execute(query.replace(old, new) if isinstance(query, bytes) else query, *arguments, **named)

    return ChangingCursor if old else psycopg.Cursor


def _await_sent(scene: Stage) -> None:
    statement = "select from dispatcher.email_log where status in ('pending', 'sending') limit 1"
    with psycopg.connect(scene.database_url, autocommit=True) as connection:
        wait_until(lambda: not connection.execute(statement).fetchall(), LONGEST_SECONDS)


def _email(key: str) -> Email:
    return Email(message_key=key, sender="a@example.com", to="b@example.org", subject="Your order", text="Thank you.")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 32, 64])
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 2.5, 25.0], help="commit_delay")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--rate", type=float, default=100.0, help="of the trickle: emails per second")
    parser.add_argument("--trickle-seconds", type=float, default=10.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
