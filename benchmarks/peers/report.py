"""The tables and the raw results of a run."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.peers import ours
from benchmarks.peers.measuring import Measured, median_rate, median_steady_rate
from benchmarks.peers.roster import PEERS, PROMISES, Peer

Cases = Mapping[tuple[str, str], Sequence[Measured]]
"""The repetitions of each case, by the case's name and a description of the case's knobs."""
Rate = Callable[[Sequence[Measured]], float]

WIDTH: Final = 170
"""The width of tables in a file or a pipe, in characters."""
BOOKS: Final = ("missing", "duplicates", "held", "unrecorded")
_BESIDE: Final = ("ours is", "published is")
_CAPTION: Final = (
    "`ours is` and `published is`: how many times as fast our dispatcher is: the ratio of the medians, and the lowest\n"
    "and highest ratio of single repetitions. For `ours is`, messages are published during the measured time; for\n"
    "`published is`, before it.\n"
    "Stock peers are compared with our defaults, ours and ours-published;\n"
    "tuned peers and post_office-leasing with ours tuned, ours-tuned and ours-tuned-published.\n"
    "For Celery and dramatiq, whose messages are on RabbitMQ before the clock starts, read `published is`.\n"
    "For procrastinate, graphile-worker and django-post_office, which have no broker, read `ours is`."
)


def tables(cases: Cases) -> tuple[Table, ...]:
    """All tables of a run."""
    return speeds(cases), costs(cases), promises(cases)


def by_case(results: Iterable[Measured]) -> Cases:
    """Group results by case, in order of first appearance."""
    cases: dict[tuple[str, str], list[Measured]] = {}
    for result in results:
        cases.setdefault((result.name, described(result.knobs)), []).append(result)
    return cases


def described(knobs: Mapping[str, object]) -> str:
    """Knobs as text."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in knobs.items())


def speeds(cases: Cases) -> Table:
    """Two rates for each case: `emails/s` over all emails, and `steady/s`, which leaves out the start and the end."""

    def row(results: Sequence[Measured]) -> list[str]:
        rates = [result.emails_per_second for result in results]
        return [
            f"{results[0].emails:,}",
            f"{median_rate(results):,.0f}",
            f"{min(rates):,.0f} – {max(rates):,.0f}",
            *_times_as_fast(cases, results, median_rate, turns(cases, results)),
            f"{median_steady_rate(results):,.0f}",
            *_times_as_fast(cases, results, median_steady_rate),
        ]

    headings = ("emails", "emails/s", "range", *_BESIDE, "steady/s", *_BESIDE)
    return _table("Emails per second, median of the repetitions (lowest – highest)", headings, cases, row, _CAPTION)


def costs(cases: Cases) -> Table:
    """For each case: the CPU per email, and the missing, duplicate and held emails."""

    def row(results: Sequence[Measured]) -> list[str]:
        return [
            f"{statistics.median(result.cpu_microseconds for result in results):,.0f}",
            f"{statistics.median(result.servers_cpu_microseconds for result in results):,.0f}",
            str(max(result.processes for result in results)),
            *(str(sum(getattr(result, book) for result in results)) for book in BOOKS),
        ]

    headings = ("CPU µs", "servers' µs", "processes", *BOOKS)
    return _table("CPU per email, median; missing, duplicate and held emails of all repetitions", headings, cases, row)


def promises(cases: Cases) -> Table:
    """What each case does when something fails."""
    table = Table(title="What each promises", show_lines=True)
    for heading in ("", "email and message are atomic", "if a worker is killed (kill -9)", "source"):
        table.add_column(heading)
    for who in dict.fromkeys(_promiser(name) for name, _ in cases):
        promise = PROMISES[who]
        table.add_row(who, promise.enqueue, promise.kill, promise.source)
    return table


def ratios(cases: Cases, results: Sequence[Measured], rate: Rate = median_rate) -> dict[str, float]:
    """The speed of our comparable cases as a multiple of this case's speed, by the names of our cases.

    Leaves out cases that were not measured, and cases that were measured with different knobs. Empty for our own cases.
    """
    beside: dict[str, float] = {}
    for counterpart in _counterparts(results[0].name):
        measured = [results for (name, _), results in cases.items() if name == counterpart]
        if len(measured) == 1:
            beside[counterpart] = rate(measured[0]) / rate(results)
    return beside


def turns(cases: Cases, results: Sequence[Measured]) -> dict[str, tuple[float, float]]:
    """For each name that `ratios` returns, the lowest and the highest ratio of a single repetition. Empty if there was
    only one repetition."""
    spread: dict[str, tuple[float, float]] = {}
    for counterpart in ratios(cases, results):
        (measured,) = (results for (name, _), results in cases.items() if name == counterpart)
        if len(measured) == len(results) > 1:
            pairs = zip(measured, results, strict=True)
            by_turn = [own.emails_per_second / theirs.emails_per_second for own, theirs in pairs]
            spread[counterpart] = min(by_turn), max(by_turn)
    return spread


def line(result: Measured, facts: Mapping[str, object]) -> str:
    """One line of JSON."""
    return json.dumps({**dataclasses.asdict(result), "machine": facts}) + "\n"


def begin(folder: Path) -> None:
    """Create an empty `peers.jsonl`, so that the file contains one run only, like the plots in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.jsonl").write_bytes(b"")


def write_tables(folder: Path, cases: Cases, machine: str) -> None:
    """Write all tables as text into `tables.txt`."""
    with (folder / "tables.txt").open("w") as file:
        console = Console(file=file, width=WIDTH)
        for table in tables(cases):
            console.print(table)
        console.print(machine)


def append(folder: Path, result: Measured, facts: Mapping[str, object]) -> None:
    """Append a result to `peers.jsonl` immediately, so that an interrupted run keeps its results."""
    with (folder / "peers.jsonl").open("a") as file:
        file.write(line(result, facts))


def _table(
    title: str,
    headings: Iterable[str],
    cases: Cases,
    row: Callable[[Sequence[Measured]], Iterable[str]],
    caption: str | None = None,
) -> Table:
    """A table with a row for each case. If a case was measured with different knobs, a column shows the knobs."""
    are_swept = len({name for name, _ in cases}) < len(cases)
    table = Table(title=title, caption=caption)
    table.add_column("case", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    if are_swept:
        table.add_column("with")
    for (name, knobs), results in cases.items():
        table.add_row(name, *row(results), *([knobs] if are_swept else []))
    return table


def _times_as_fast(
    cases: Cases, results: Sequence[Measured], rate: Rate, spread: Mapping[str, tuple[float, float]] | None = None
) -> list[str]:
    """A cell for each of our comparable cases, with the range of the repetitions if `spread` is given."""
    beside = ratios(cases, results, rate)
    cells = {name: f"{times:.1f} ×" for name, times in beside.items()}
    for name, (lowest, highest) in (spread or {}).items():
        cells[name] += f" ({lowest:.1f} – {highest:.1f})"
    return [cells.get(name, "") for name in _counterparts(results[0].name)] or [""] * len(_BESIDE)


def _counterparts(name: str) -> tuple[str, ...]:
    """Our cases with which a case is compared, in the order of the columns."""
    return () if name in ours.NAMES else ours.counterparts(tuned=_peer(name).is_tuned)


def _promiser(name: str) -> str:
    """The key in `PROMISES` for a case: the name of the case, or of the peer's environment."""
    if name in ours.NAMES:
        return "ours"
    return name if name in PROMISES else _peer(name).environment


def _peer(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)
