"""Counts the instructions per email, under callgrind. Other load on the machine does not change the counts.

One part is a worker's pipeline: the real stages, SendGrid adapter, HTTP connection, in-flight ledger, log, metrics and
consumer. PostgreSQL, RabbitMQ, TLS and sockets are replaced at their edge. The other parts are the lease and record
statements at several batch sizes, and the enqueue of 1 and of 500 emails. Each of these parts is counted twice: in the
client (our code and psycopg), and in PostgreSQL's backend. Two runs differ by less than half a per cent (the clients of
batches of 6 by up to one), so a count shows a change that a clock cannot show. Only instructions in user mode count.
Caches and system calls do not show, so a claim about speed needs run.py, too.

With --tree, the program counts another checkout, which must have been set up with `./run setup`. With two of them, the
table also shows the ratio of the second to the first:

    git clone . /tmp/base && git -C /tmp/base checkout COMMIT && (cd /tmp/base && ./run setup)
    python benchmarks/instructions.py --tree /tmp/base --tree .

It needs callgrind, which is in Debian's package valgrind, and takes two to three minutes for each checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/instructions.py`

from benchmarks.instruction_loads import NOTHING, Part
from benchmarks.run import FAILED, INTERRUPTED, WIDTH
from dispatcher.dev import postgres
from dispatcher.dev.keeper import Plan
from dispatcher.dev.processes import Processes, await_condition
from dispatcher.errors import DispatcherError

HERE: Final = Path(__file__).resolve().parent
USAGE: Final = 2
CLIENT: Final = "client"
BACKEND: Final = "PostgreSQL"
WORKER: Final = "worker, in all"
PER_WORKER: Final = ("pipeline", "lease 72", "record 108")
"""The parts of a worker's work for an email of a backlog. These are the batch sizes that the chain reaches."""
READY_SECONDS: Final = 120.0
SETTINGS: Final = {"autovacuum": "off", "max_connections": "10"}
"""Autovacuum would change the tables' pages at a different moment in each run."""
_TOTAL: Final = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
Figures = dict[str, dict[str, float]]
"""Instructions per email, by part, then by process: `CLIENT`, `BACKEND`."""


class NotCounted(RuntimeError):
    """A count failed; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _options(arguments)
    console = Console(stderr=True)
    trees = options.tree or [HERE.parent]
    if unready := [tree for tree in trees if not python_of(tree).exists()]:
        console.print(f"{unready[0]} has no .venv. Run there: ./run setup", style="red", markup=False)
        return USAGE
    if not shutil.which("valgrind"):
        console.print("valgrind was not found. Run: apt-get install valgrind", style="red")
        return USAGE
    try:
        counted = [(str(tree), count(tree, console)) for tree in trees]
    except (DispatcherError, NotCounted, psycopg.Error) as error:
        console.print(f"Not counted: {error}", style="red", markup=False)
        return FAILED
    except KeyboardInterrupt:
        console.print("Interrupted; nothing is left running.")
        return INTERRUPTED
    if options.json:
        for tree, figures in counted:
            print(json.dumps({"tree": tree, "instructions_per_email": figures}))
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(table(counted))
    return 0


def count(tree: Path, console: Console) -> Figures:
    """Counts every part in one checkout."""
    with tempfile.TemporaryDirectory(prefix="dispatcher-count-") as folder, _server(Path(folder), console) as server:
        server.execute("create database original")
        server.run(tree, "migrate", "original")
        client: dict[str, float] = {}
        for load in ("worker", "statements"):
            console.log(f"{tree}: counting the client, load {load}")
            server.execute(f"create database {load} template original")
            client |= server.count_client(tree, load)
        console.log(f"{tree}: counting PostgreSQL's backends")
        server.execute("create database backends template original")
        server.restart_under_callgrind()
        backend = server.count_backends(tree, "statements", "backends")
    return {part: {CLIENT: client[part]} | ({BACKEND: backend[part]} if part in backend else {}) for part in client}


class Server:
    """A private PostgreSQL, and the loads that use it."""

    def __init__(self, processes: Processes, url: str) -> None:
        self._processes = processes
        self._url = url
        self._folder = processes.folder

    def execute(self, statement: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def run(self, tree: Path, load: str, database: str, prefix: Sequence[str] = ()) -> list[Part]:
        """Runs a load with the Python of the checkout; returns the load's parts."""
        parts, log = self._folder / "parts.json", self._folder / "load.log"
        url = urlunsplit(urlsplit(self._url)._replace(path=f"/{database}"))
        words = [*prefix, str(python_of(tree)), "-P", str(HERE / "instruction_loads.py"), load, url, str(parts)]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        with log.open("wb") as output:
            done = subprocess.run(words, cwd=tree, env=environment, stdout=output, stderr=output, check=False)
        if done.returncode:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise NotCounted(f"the load {load} of {tree} ended with {done.returncode}; the end of its output:\n{end}")
        return [Part(*each) for each in json.loads(parts.read_text())]

    def count_client(self, tree: Path, load: str) -> dict[str, float]:
        """Runs a load under callgrind; returns the instructions per email of each part."""
        parts = self.run(tree, load, load, callgrind(self._folder, load, "ctermid"))
        (first,) = self._folder.glob(f"{load}.*.1")
        return per_email([each._replace(backend_pid=int(first.suffixes[0][1:])) for each in parts], self._folder / load)

    def count_backends(self, tree: Path, load: str, database: str) -> dict[str, float]:
        """Runs a load while PostgreSQL is under callgrind; returns the backends' instructions per email."""
        return per_email(self.run(tree, load, database), self._folder / "backend")

    def restart_under_callgrind(self) -> None:
        plan: Plan = json.loads((self._folder / "plan" / f"{postgres.NAME}.json").read_text())
        self._processes.stop()
        self._processes.spawn_keeper(os.getpid())
        at = next(i for i, word in enumerate(plan["argv"]) if word.endswith("/postgres"))
        plan["argv"][at:at] = callgrind(self._folder, "backend", "pg_backend_pid")
        self._processes.launch(postgres.NAME, plan)
        await_condition(
            self._accepts,
            seconds=READY_SECONDS,
            broken=lambda: self._processes.exit_report(postgres.NAME),
            what="PostgreSQL under callgrind",
        )

    def _accepts(self) -> bool:
        try:
            self.execute("select")
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def _server(folder: Path, console: Console) -> Iterator[Server]:
    processes = Processes(folder)
    processes.spawn_keeper(os.getpid())
    try:
        access, _ = postgres.start(processes, console.log, SETTINGS)
        yield Server(processes, access.url)
    finally:
        processes.stop()


def callgrind(folder: Path, name: str, mark: str) -> list[str]:
    """The words before a command whose instructions are counted.

    Whenever a process calls the function `mark`, its count since the last call is written to the next file
    `folder/name.PID.NUMBER`.
    """
    files = [f"--callgrind-out-file={folder / name}.%p", f"--log-file={folder / name}.log.%p"]
    program = shutil.which("valgrind")
    assert program is not None
    return [program, "--tool=callgrind", f"--dump-before={mark}", *files]


def per_email(parts: Sequence[Part], stem: Path) -> dict[str, float]:
    """The instructions per email of each part, without those of its marks.

    A process's first mark ends the count of its start; its second mark ends the count of its first part.
    """
    marks: Counter[int] = Counter()
    counts: dict[str, tuple[int, int]] = {}
    for part in parts:
        marks[part.backend_pid] += 2
        found = _TOTAL.search(Path(f"{stem}.{part.backend_pid}.{marks[part.backend_pid]}").read_text(errors="replace"))
        if found is None:
            raise NotCounted(f"callgrind wrote no total for {part.name}")
        counts[part.name] = int(found[1]), part.emails
    of_marks, _ = counts.pop(NOTHING, (0, 1))
    return {name: (count - of_marks) / emails for name, (count, emails) in counts.items()}


def python_of(tree: Path) -> Path:
    """The Python of a checkout."""
    return tree.resolve() / ".venv" / "bin" / "python"


def table(counted: Sequence[tuple[str, Figures]]) -> Table:
    """The figures of each checkout, and the ratio of the last to the first."""
    shown = Table(title="Instructions per email, in thousands")
    shown.add_column("part")
    for tree, _ in counted:
        for process in (CLIENT, BACKEND):
            shown.add_column(f"{process}\n{tree}", justify="right", overflow="fold")
    if len(counted) > 1:
        for process in (CLIENT, BACKEND):
            shown.add_column(f"{process}\nratio", justify="right")
    for name, rows in _rows([figures for _, figures in counted]):
        shown.add_row(name, *rows)
    return shown


def _rows(counted: Sequence[Figures]) -> Iterator[tuple[str, list[str]]]:
    every = [{**figures, WORKER: sum_of(figures)} for figures in counted]
    for part in every[0]:
        cells = [[each[part].get(process) for process in (CLIENT, BACKEND)] for each in every]
        words = ["" if count is None else f"{count / 1000:,.1f}" for each in cells for count in each]
        if len(every) > 1:
            words += [
                f"{last / first:.3f}" if last and first else "" for first, last in zip(cells[0], cells[-1], strict=True)
            ]
        yield part, words


def sum_of(figures: Figures) -> dict[str, float]:
    """What an email of a backlog costs a worker, and PostgreSQL on behalf of the worker."""
    return {process: sum(figures[part].get(process, 0.0) for part in PER_WORKER) for process in (CLIENT, BACKEND)}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks/instructions.py",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tree", type=Path, action="append", metavar="PATH", help="a checkout to count; default: this checkout"
    )
    parser.add_argument("--json", action="store_true", help="print one line per checkout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
