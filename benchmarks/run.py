"""Capacity as workers grow: `python benchmarks/run.py --workers 1,2 --emails 5000 --provider sendgrid`.

Every case has a database and queues of its own on the same private servers, all durability on; the emails are enqueued
first, then `dispatcher run` drains them. The figure is emails per second from the first attempt to the last record.
Cases are interleaved over the repetitions, and the median of each is shown, because a machine's mood changes within
minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/run.py`

from benchmarks.doubles import PROVIDERS
from benchmarks.rig import Case, Measured, measure
from dispatcher.dev.servers import private_servers


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    cases = [
        Case(provider, workers, options.emails, options.prefetch, options.latency_ms)
        for provider in options.provider
        for workers in options.workers
    ]
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-", dir=_memory()) as doubles,
    ):
        results = _run(cases, options.repeat, Path(folder), Path(doubles), console)
    if options.json:
        for result in results:
            sys.stdout.write(json.dumps({**dataclasses.asdict(result), **machine()}) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 110).print(_table(results))
    if any(result.lost or result.duplicates for result in results):
        sys.exit("The books do not balance: see lost and duplicates.")


def _memory() -> str | None:
    """Where files cost little: the doubles' mail must not be what is measured. PostgreSQL and RabbitMQ stay on disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


def _run(cases: list[Case], repeat: int, folder: Path, doubles: Path, console: Console) -> list[Measured]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: list[Measured] = []
    with (
        private_servers(folder / "servers", progress=console.log) as servers,
        Progress(*columns, console=console) as bar,
    ):
        task = bar.add_task("measuring", total=len(cases) * repeat)
        for repetition in range(repeat):
            for number, case in enumerate(cases):
                bar.update(task, description=f"{case.provider}, {case.workers} workers")
                results.append(measure(servers, case, doubles / f"case-{repetition}-{number}"))
                bar.advance(task)
    return results


def _table(results: Iterable[Measured]) -> Table:
    by_case: dict[Case, list[Measured]] = {}
    for result in results:
        by_case.setdefault(result.case, []).append(result)
    table = Table(title="Emails per second, median of the repetitions (lowest – highest)")
    for heading in ("provider", "workers", "emails", "emails/s", "range", "enqueued/s", "lost", "duplicates", "held"):
        table.add_column(heading, justify="left" if heading == "provider" else "right")
    for case, measured in by_case.items():
        rates = [result.emails_per_second for result in measured]
        table.add_row(
            case.provider,
            str(case.workers),
            str(case.emails),
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} – {max(rates):,.0f}",
            f"{statistics.median(result.enqueue_per_second for result in measured):,.0f}",
            *(str(sum(getattr(result, book) for result in measured)) for book in ("lost", "duplicates", "held")),
        )
    return table


def machine() -> dict[str, object]:
    """What a figure is to be read with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "python": platform.python_version()}


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=summary, epilog=details)
    parser.add_argument("--workers", type=_numbers, default=[1, 2], metavar="N,…", help="default: 1,2")
    parser.add_argument("--emails", type=int, default=5000, metavar="N", help="per case; default: 5000")
    parser.add_argument("--provider", type=_providers, default=["sendgrid"], help="default: sendgrid")
    parser.add_argument("--prefetch", type=int, help="messages that a worker holds; default: the product's")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of the provider's double; default: 0")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--json", action="store_true", help="one line per case and repetition")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("must be whole numbers from 1")
    return numbers


def _providers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PROVIDERS):
        raise argparse.ArgumentTypeError(f"does not know {', '.join(unknown)}; known are {', '.join(PROVIDERS)}")
    return names


if __name__ == "__main__":
    main()
