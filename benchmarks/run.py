"""Measures what this machine can send: throughput by number of workers, latency, and the CPU of each part per email.

Every case has its own queues and database on the same servers. Durability, attempt rows, metrics and logs are on, as in
production. `dispatcher run` is started and warmed up first. Then either a backlog is committed in one transaction, and
the clock runs until the last email is recorded; or, with --rate, emails arrive by a schedule. The repetitions of the
cases are interleaved, because a machine's speed changes within minutes; medians and ranges are shown. The provider's
double counts what it accepted, so every result includes lost, duplicate and held emails.

The servers are private servers on this machine, unless DISPATCHER_DATABASE_URL, DISPATCHER_AMQP_URL and
DISPATCHER_RABBITMQ_MANAGEMENT_URL are set. The CPU of servers that these variables set cannot be measured.

examples:
  benchmarks/run.py --workers 1,2,4 --out benchmarks/results/sendgrid
  benchmarks/run.py --workers 2 --rate 30% --duration 20         open loop at 30 % of the measured throughput
  benchmarks/run.py --workers 1,2 --latency-ms 50                a slow provider
  benchmarks/run.py --workers 2 --preload 0,1000000              the effect of a million emails in the tables
  benchmarks/run.py --workers 2 --rate 1000 --duration 600 --hold-seconds 0,600
                                                                 a transaction stays open, so vacuum removes nothing
  benchmarks/run.py --workers 2 --suppressed 0,100000            the cost of a hundred thousand suppressed addresses
  benchmarks/run.py --workers 2 --templated --set DISPATCHER_BULK_CALL_EMAILS=1,100    without and with bulk calls
  benchmarks/run.py --workers 2 --faults                         workers get SIGKILL during the run
  benchmarks/run.py --provider smtp --sink c                     against Postfix's smtp-sink, in C
  benchmarks/run.py --compare before after                       compares two runs that --out has written
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/run.py`

from benchmarks import report
from benchmarks.capacity import Figures, measure
from benchmarks.doubles import PROVIDERS
from benchmarks.machine import machine, versions
from benchmarks.preload import preload, suppress
from benchmarks.results import NAME, Record, lines_of, read_records, record_of
from benchmarks.rig import Case, database
from benchmarks.statements import preload_settings
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.errors import DispatcherError

FAILED: Final = 1
MISUSED: Final = 2
INTERRUPTED: Final = 130
TERMINATED: Final = 143
TRIAL_EMAILS: Final = 2000
"""The number of emails per worker in the trial run, from which --duration derives the number of emails."""
OPEN_LOOP_SECONDS: Final = 15.0
WIDTH: Final = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _options(arguments)
    console = Console(stderr=True)
    try:
        earlier = [read_records(folder) for folder in options.compare]
        if len(earlier) == 2:
            _stdout().print(report.comparison(*earlier))
            return 0
        records = _records(options, console)
    except ValueError as error:
        console.print(f"--compare: {error}", style="red")
        return MISUSED
    except (DispatcherError, RuntimeError, psycopg.Error) as error:
        console.print(f"Measurement failed: {error}", style="red", markup=False)
        return FAILED
    except KeyboardInterrupt:
        console.print("Interrupted; all processes were stopped.")
        return INTERRUPTED
    _output(records, earlier, options, console)
    if any(record["books"]["lost"] or record["books"]["duplicates"] for record in records):
        console.print("Emails were lost or duplicated: see the columns lost and duplicates.", style="red")
        return FAILED
    return 0


def _records(options: argparse.Namespace, console: Console) -> list[Record]:
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-", dir=memory_folder()) as doubles,
        private_servers(
            Path(folder) / "servers", progress=console.log, postgres_settings=preload_settings()
        ) as servers,
        contextlib.closing(Bench(servers, Path(doubles), options, console)) as bench,
    ):
        facts = {**machine(), **versions(servers)}
        with bench.bar:
            figures = list(bench.run())
        return [record_of(each, facts) for each in figures]


class Bench:
    """One invocation of the command, on running servers.

    Attributes:
        bar: Shows the progress.
    """

    def __init__(self, servers: Servers, folder: Path, options: argparse.Namespace, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console)
        self._servers = servers
        self._folder = folder
        self._options = options
        self._console = console
        self._kept = contextlib.ExitStack()
        self._preloaded: dict[int, str] = {}
        self._task = self.bar.add_task("measuring", total=None)
        self._done = 0

    def run(self) -> Iterator[Figures]:
        """Measure every case, with all repetitions."""
        options = self._options
        cases = self._cases()
        if isinstance(options.rate, float):
            yield from self._repeat([self._looped(case, options.rate) for case in cases])
            return
        if options.duration:
            cases = [self._lasting(case, options.duration) for case in cases]
        figures = list(self._repeat(cases))
        yield from figures
        if options.rate:
            share = float(options.rate.removesuffix("%")) / 100
            yield from self._repeat([self._looped(case, share * _median_rate(case, figures)) for case in cases])

    def close(self) -> None:
        """Drop the databases that several cases used."""
        self._kept.close()

    def _cases(self) -> list[Case]:
        options = self._options
        return [
            Case(
                provider,
                workers,
                options.emails,
                prefetch,
                options.latency_ms,
                has_faults=options.faults,
                preload=preloaded,
                suppressed=suppressed,
                hold_seconds=hold_seconds,
                sink=options.sink if provider == "smtp" else "python",
                is_templated=options.templated,
                settings=settings,
            )
            for provider in options.provider
            for prefetch in options.prefetch
            for preloaded in options.preload
            for suppressed in options.suppressed
            for hold_seconds in options.hold_seconds
            for settings in itertools.product(*options.set)
            for workers in options.workers
        ]

    def _looped(self, case: Case, rate: float) -> Case:
        seconds = self._options.duration or OPEN_LOOP_SECONDS
        return dataclasses.replace(case, rate=round(rate, 1), emails=max(1, round(rate * seconds)))

    def _lasting(self, case: Case, seconds: float) -> Case:
        """The same case, but with enough emails for this duration. A trial run determines the number."""
        self.bar.update(self._task, description="trial to find the number of emails")
        trial = self._measured(dataclasses.replace(case, emails=TRIAL_EMAILS * case.workers, has_faults=False))
        return dataclasses.replace(case, emails=round(trial.emails_per_second * seconds))

    def _repeat(self, cases: list[Case]) -> Iterator[Figures]:
        self.bar.update(self._task, total=self._done + len(cases) * self._options.repeat)
        for _ in range(self._options.repeat):
            for case in cases:
                words = f"{case.provider}, {case.workers} workers, {case.emails:,} emails"
                self.bar.update(self._task, description=words)
                yield self._measured(case)
                self.bar.advance(self._task)
                self._done += 1

    def _measured(self, case: Case) -> Figures:
        with tempfile.TemporaryDirectory(prefix="case-", dir=self._folder) as name, contextlib.ExitStack() as stack:
            url = self._preloaded_url(case.preload) if case.preload else stack.enter_context(database(self._servers))
            if case.suppressed:
                suppress(url, case.suppressed)
            return measure(self._servers, case, Path(name) / "case", url)

    def _preloaded_url(self, emails: int) -> str:
        """The URL of a database with this many finished emails. The database is filled once, and all cases that need
        this number share it."""
        if emails not in self._preloaded:
            url = self._kept.enter_context(database(self._servers))
            self._console.log(f"filling the tables with {emails:,} finished emails")
            preload(url, emails)
            self._preloaded[emails] = url
        return self._preloaded[emails]


def _median_rate(case: Case, figures: list[Figures]) -> float:
    return statistics.median(each.emails_per_second for each in figures if each.case == case)


def _output(records: list[Record], earlier: list[list[Record]], options: argparse.Namespace, console: Console) -> None:
    out = _stdout()
    if options.out:
        _write(records, options.out, console)
    if options.json:
        sys.stdout.write(lines_of(records))
        return
    out.print(report.tables(records))
    if earlier:
        out.print(report.comparison(earlier[0], records))


def _write(records: list[Record], folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(lines_of(records))
    with (folder / "tables.txt").open("w") as file:
        Console(file=file, width=WIDTH).print(report.tables(records))
    try:
        from benchmarks.plots import draw
    except ImportError:
        console.print("No plots: matplotlib is missing (pip install 'email-dispatcher[bench]').")
        return
    files = [folder / NAME, folder / "tables.txt", *draw(records, folder)]
    console.print(f"written: {', '.join(str(file) for file in files)}", soft_wrap=True)


def _stdout() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def memory_folder() -> str | None:
    """A folder in memory, so that the doubles' files do not distort the result. The servers stay on disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


def terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--workers", type=_numbers, default=[1, 2], metavar="N,…", help="default: 1,2")
    load.add_argument("--emails", type=_number, default=20_000, metavar="N", help="per case; default: 20000")
    load.add_argument(
        "--duration", type=_amount, metavar="S", help="instead of --emails: as many as take about S seconds"
    )
    load.add_argument("--rate", type=_rate, metavar="R", help="arrivals per second, or 30%% of the measured capacity")
    load.add_argument(
        "--preload", type=_counts, default=[0], metavar="N,…", help="finished emails already in the tables"
    )
    load.add_argument("--suppressed", type=_counts, default=[0], metavar="N,…", help="suppressed addresses")
    load.add_argument("--hold-seconds", type=_counts, default=[0], metavar="S,…", help=_HOLD_HELP)
    load.add_argument("--templated", action="store_true", help="emails with a provider's template")
    load.add_argument("--faults", action="store_true", help="kill a worker every 2 seconds, at most 20 times")
    setting = parser.add_argument_group("the dispatcher and its provider")
    setting.add_argument("--provider", type=_providers, default=["sendgrid"], metavar="NAME,…", help=_PROVIDER_HELP)
    setting.add_argument("--latency-ms", type=float, default=0.0, metavar="L", help="latency of the provider's double")
    setting.add_argument("--prefetch", type=_numbers, default=[None], metavar="N,…", help="default: the product's")
    setting.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=V,…", help=_SET_HELP)
    setting.add_argument("--sink", choices=("python", "c"), default="python", help=_SINK_HELP)
    output = parser.add_argument_group("the results")
    output.add_argument("--repeat", type=_number, default=3, metavar="N", help="repetitions of every case; default: 3")
    output.add_argument("--out", type=Path, metavar="DIR", help="write run.jsonl, tables.txt and plots there")
    output.add_argument("--compare", type=Path, nargs="+", default=[], metavar="DIR", help=_COMPARE_HELP)
    output.add_argument("--json", action="store_true", help="print one line of JSON per case and repetition, no tables")
    options = parser.parse_args(arguments)
    if len(options.compare) > 2:
        parser.error("argument --compare: takes one folder or two")
    if any(options.preload) and any(options.suppressed):
        parser.error("argument --suppressed: cannot be combined with --preload")
    if options.sink == "c" and "smtp" not in options.provider:
        parser.error("argument --sink: the C sink is an SMTP server: add --provider smtp")
    if options.latency_ms and "capture" in options.provider:
        parser.error("argument --latency-ms: capture writes files and has no latency; use a different provider")
    return options


_PROVIDER_HELP: Final = f"one or more of {', '.join(PROVIDERS)}; sendgrid, ses and resend over HTTPS; default: sendgrid"
_HOLD_HELP: Final = "another session keeps a snapshot for S seconds, from the beginning of the measured part on"
_SET_HELP: Final = "a setting of the dispatcher; with several values, each value is a separate case"
_SINK_HELP: Final = "for smtp: our sink with a ledger (default), or Postfix's smtp-sink in C without one"
_COMPARE_HELP: Final = "compare with the run in DIR; with two DIRs, compare those and measure nothing"


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    return [0 if part == "0" else _number(part) for part in text.split(",")]


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return amount


def _rate(text: str) -> float | str:
    return text if text.endswith("%") and _amount(text[:-1]) else _amount(text)


def _setting(text: str) -> list[tuple[str, str]]:
    name, _, values = text.partition("=")
    if not name or not values:
        raise argparse.ArgumentTypeError(f"{text!r} must have the form NAME=VALUE, such as DISPATCHER_PREFETCH=256")
    return [(name, value) for value in values.split(",")]


def _providers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PROVIDERS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(PROVIDERS)}")
    return names


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)
    sys.exit(main())
