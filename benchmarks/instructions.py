"""Counts the instructions of the dispatcher's work, under callgrind. Other load on the machine does not change a count.

The groups of counts, each with its duration on two idle cores:

    sendgrid    1 min   a worker's pipeline, per email: the real stages, SendGrid adapter, HTTP connection, in-flight
                        ledger, log, metrics and consumer. PostgreSQL, RabbitMQ, TLS and sockets are replaced.
    smtp        1 min   the same with the SMTP adapter
    statements  2 min   per email: lease and record at several batch sizes, and the enqueue of 1 and of 500 emails;
                        counted in the client (our code and psycopg), and in PostgreSQL's backend
    commands    1 min   `dispatcher --help`, `find`, `show` and `status`, each from its start to its exit
    run         2 min   `dispatcher run` with one worker: its start, an idle second of each process, and a scrape of
                        /metrics

Two counts differ by less than half a per cent (the clients of batches of 6 by up to one, idle seconds by up to twenty).
So a count shows a change that a clock cannot show. Only instructions in user mode count. Caches and system calls do not
show, so a claim about speed needs run.py, too.

With --tree, the program counts another checkout, which must have been set up with `./run setup`. With two of them, the
table also shows the ratio of the second to the first:

    git clone . /tmp/base && git -C /tmp/base checkout COMMIT && (cd /tmp/base && ./run setup)
    python benchmarks/instructions.py --tree /tmp/base --tree .

With --check, the program compares this checkout with benchmarks/results/instructions/baseline.json. It fails if a count
is more than 2 % higher (an idle second: 30 %). A change that is worth more instructions moves the baseline in the same
commit, and says why:

    python benchmarks/instructions.py --write-baseline --reason "WHY"

It needs callgrind, which is in Debian's package valgrind.
"""

from __future__ import annotations

import argparse
import json
import os
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

from benchmarks import instruction_baseline as baseline
from benchmarks.callgrind import NotCounted, callgrind, python_of, total_of
from benchmarks.instruction_loads import NOTHING, Part
from benchmarks.instruction_processes import COUNTS as PROCESSES
from benchmarks.instruction_processes import installed
from benchmarks.run import FAILED, INTERRUPTED, WIDTH
from dispatcher.dev import postgres
from dispatcher.dev.keeper import Plan
from dispatcher.dev.processes import Processes, await_condition
from dispatcher.dev.servers import private_servers
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
Figures = dict[str, dict[str, float]]
"""Instructions by part, then by process: `CLIENT`, `BACKEND`."""
GROUPS: Final = ("sendgrid", "smtp", "statements", "commands", "run")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _options(arguments)
    console = Console(stderr=True)
    trees = options.tree or [HERE.parent]
    if options.write_baseline != bool(options.reason):
        console.print("--write-baseline and --reason need each other: say why the counts changed.", style="red")
        return USAGE
    if unready := [tree for tree in trees if not python_of(tree).exists()]:
        console.print(f"{unready[0]} has no .venv. Run there: ./run setup", style="red", markup=False)
        return USAGE
    if not shutil.which("valgrind"):
        console.print("valgrind was not found. Run: apt-get install valgrind", style="red")
        return USAGE
    try:
        results = [(tree, *count(tree, options.groups, console)) for tree in trees]
    except (DispatcherError, NotCounted, psycopg.Error) as error:
        console.print(f"Not counted: {error}", style="red", markup=False)
        return FAILED
    except KeyboardInterrupt:
        console.print("Interrupted; nothing is left running.")
        return INTERRUPTED
    counted = [(str(tree), figures) for tree, figures, _ in results]
    if options.json:
        for tree, figures in counted:
            print(json.dumps({"tree": tree, "instructions": figures}))
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(table(counted))
    _, figures, build = results[-1]
    if options.write_baseline:
        baseline.write(build, figures, options.reason)
    wrong = baseline.findings(build, figures) if options.check else []
    for finding in wrong:
        console.print(finding, style="red", markup=False, highlight=False, soft_wrap=True)
    return FAILED if wrong else 0


def count(tree: Path, groups: Sequence[str], console: Console) -> tuple[Figures, str]:
    """Counts these groups in one checkout; returns the counts, and the name of the builds of Python and PostgreSQL."""
    figures: Figures = {}
    # A process that callgrind counts writes its last file when it ends, perhaps after its parent.
    with tempfile.TemporaryDirectory(prefix="dispatcher-count-", ignore_cleanup_errors=True) as folder:
        whole = [group for group in groups if group in PROCESSES]
        if whole:
            figures |= _count_processes(tree, whole, Path(folder), console)
        with _server(Path(folder), console) as server:
            build = baseline.build_of(tree, server.version())
            figures = _count_loads(server, tree, [each for each in groups if each not in whole], console) | figures
    return figures, build


def _count_loads(server: Server, tree: Path, loads: Sequence[str], console: Console) -> Figures:
    server.execute("create database original")
    server.run(tree, "migrate", "original")
    client: dict[str, float] = {}
    for load in loads:
        console.log(f"{tree}: counting the client, load {load}")
        server.execute(f"create database {load} template original")
        client |= server.count_client(tree, load)
    backend: dict[str, float] = {}
    if "statements" in loads:
        console.log(f"{tree}: counting PostgreSQL's backends")
        server.execute("create database backends template original")
        server.restart_under_callgrind()
        backend = server.count_backends(tree, "statements", "backends")
    return {part: {CLIENT: client[part]} | ({BACKEND: backend[part]} if part in backend else {}) for part in client}


def _count_processes(tree: Path, groups: Sequence[str], folder: Path, console: Console) -> Figures:
    counted: dict[str, float] = {}
    with private_servers(folder / "servers", console.log) as servers, installed(tree, folder, servers) as installation:
        for group in groups:
            console.log(f"{tree}: counting processes, {group}")
            counted |= PROCESSES[group](installation)
    return {part: {CLIENT: instructions} for part, instructions in counted.items()}


class Server:
    """A private PostgreSQL, and the loads that use it."""

    def __init__(self, processes: Processes, url: str) -> None:
        self._processes = processes
        self._url = url
        self._folder = processes.folder

    def execute(self, statement: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(statement.encode())

    def version(self) -> str:
        """PostgreSQL's version, with the version of its package."""
        with psycopg.connect(self._url) as connection:
            return connection.info.parameter_status("server_version") or "unknown"

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


def per_email(parts: Sequence[Part], stem: Path) -> dict[str, float]:
    """The instructions per email of each part, without those of its marks.

    A process's first mark ends the count of its start; its second mark ends the count of its first part.
    """
    marks: Counter[int] = Counter()
    counts: dict[str, tuple[int, int]] = {}
    for part in parts:
        marks[part.backend_pid] += 2
        file = Path(f"{stem}.{part.backend_pid}.{marks[part.backend_pid]}")
        counts[part.name] = total_of(file), part.emails
    of_marks, _ = counts.pop(NOTHING, (0, 1))
    return {name: (count - of_marks) / emails for name, (count, emails) in counts.items()}


def table(counted: Sequence[tuple[str, Figures]]) -> Table:
    """The figures of each checkout, and the ratio of the last to the first."""
    shown = Table(title="Instructions in thousands: per email, command, start, second or scrape")
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
    every = [
        {**figures, WORKER: sum_of(figures)} if figures.keys() >= set(PER_WORKER) else figures for figures in counted
    ]
    for part in every[0]:
        cells = [[each.get(part, {}).get(process) for process in (CLIENT, BACKEND)] for each in every]
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
    parser.add_argument(
        "--groups", type=_groups, default=GROUPS, metavar="NAMES", help="some of the groups, separated by commas"
    )
    parser.add_argument("--check", action="store_true", help="compare with the baseline, and fail if a count is higher")
    parser.add_argument(
        "--write-baseline", action="store_true", help="replace the baseline for this build; needs --reason"
    )
    parser.add_argument("--reason", metavar="TEXT", help="why the counts changed; for --write-baseline")
    parser.add_argument("--json", action="store_true", help="print one line per checkout")
    return parser.parse_args(arguments)


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in GROUPS]:
        raise argparse.ArgumentTypeError(f"unknown group {unknown[0]}; known: {', '.join(GROUPS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
