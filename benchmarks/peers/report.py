"""The tables and the raw lines of a run."""

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
"""The repetitions of each case, by its name and its knobs in words."""
Rate = Callable[[Sequence[Measured]], float]

WIDTH: Final = 170
"""Of tables that go into a file or a pipe, in characters."""
BOOKS: Final = ("missing", "duplicates", "held", "unrecorded")
_BESIDE: Final = ("ours is", "published is")
_CAPTION: Final = (
    "ours is, published is: how many times as fast ours is, published while the clock runs and before it starts;\n"
    "the medians' ratio, and of the turns by themselves the lowest and the highest.\n"
    "Like for like: stock peers are compared with our defaults, ours and ours-published;\n"
    "tuned peers and post_office-leasing with ours tuned, ours-tuned and ours-tuned-published.\n"
    "Celery's and dramatiq's messages are on RabbitMQ before the clock starts: read `published is`.\n"
    "procrastinate and django-post_office have no broker, and look for what is due while it runs: read `ours is`."
)


def tables(cases: Cases) -> tuple[Table, ...]:
    """All that is told of a run."""
    return speeds(cases), costs(cases), promises(cases)


def by_case(results: Iterable[Measured]) -> Cases:
    """Results in the order in which their cases first came."""
    cases: dict[tuple[str, str], list[Measured]] = {}
    for result in results:
        cases.setdefault((result.name, in_words(result.knobs)), []).append(result)
    return cases


def in_words(knobs: Mapping[str, object]) -> str:
    """Knobs, for people."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in knobs.items())


def speeds(cases: Cases) -> Table:
    """How fast each is, over all emails and without start and end; where one has several knobs, with which."""

    def row(told: Sequence[Measured]) -> list[str]:
        rates = [result.emails_per_second for result in told]
        return [
            f"{told[0].emails:,}",
            f"{median_rate(told):,.0f}",
            f"{min(rates):,.0f} – {max(rates):,.0f}",
            *_times_as_fast(cases, told, median_rate, turns(cases, told)),
            f"{median_steady_rate(told):,.0f}",
            *_times_as_fast(cases, told, median_steady_rate),
        ]

    headings = ("emails", "emails/s", "range", *_BESIDE, "steady/s", *_BESIDE)
    return _table("Emails per second, median of the repetitions (lowest – highest)", headings, cases, row, _CAPTION)


def costs(cases: Cases) -> Table:
    """What an email costs with each, and the books."""

    def row(told: Sequence[Measured]) -> list[str]:
        return [
            f"{statistics.median(result.cpu_microseconds for result in told):,.0f}",
            f"{statistics.median(result.servers_cpu_microseconds for result in told):,.0f}",
            str(max(result.processes for result in told)),
            *(str(sum(getattr(result, book) for result in told)) for book in BOOKS),
        ]

    headings = ("CPU µs", "servers' µs", "processes", *BOOKS)
    return _table("CPU per email, median of the repetitions, and the books of all of them", headings, cases, row)


def promises(cases: Cases) -> Table:
    """What each does about the things that go wrong."""
    table = Table(title="What each promises", show_lines=True)
    for heading in ("", "email and message stand or fall together", "a worker is killed (kill -9)", "where it says so"):
        table.add_column(heading)
    for who in dict.fromkeys(_promiser(name) for name, _ in cases):
        promise = PROMISES[who]
        table.add_row(who, promise.enqueue, promise.kill, promise.source)
    return table


def ratios(cases: Cases, told: Sequence[Measured], rate: Rate = median_rate) -> dict[str, float]:
    """How many times as fast as this case its counterparts of ours are, by their names.

    Left out is what was not measured, or was with several knobs: then there is no saying which. Our own have none.
    """
    beside: dict[str, float] = {}
    for counterpart in _counterparts(told[0].name):
        measured = [results for (name, _), results in cases.items() if name == counterpart]
        if len(measured) == 1:
            beside[counterpart] = rate(measured[0]) / rate(told)
    return beside


def turns(cases: Cases, told: Sequence[Measured]) -> dict[str, tuple[float, float]]:
    """As `ratios`, of each turn by itself: the lowest and the highest; nothing where there was one turn."""
    spread: dict[str, tuple[float, float]] = {}
    for counterpart in ratios(cases, told):
        (measured,) = (results for (name, _), results in cases.items() if name == counterpart)
        if len(measured) == len(told) > 1:
            pairs = zip(measured, told, strict=True)
            by_turn = [own.emails_per_second / theirs.emails_per_second for own, theirs in pairs]
            spread[counterpart] = min(by_turn), max(by_turn)
    return spread


def line(result: Measured, facts: Mapping[str, object]) -> str:
    """One line of JSON."""
    return json.dumps({**dataclasses.asdict(result), "machine": facts}) + "\n"


def begin(folder: Path) -> None:
    """An empty `peers.jsonl`: what stands there is one run's, as in the plots beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.jsonl").write_bytes(b"")


def write_tables(folder: Path, cases: Cases, machine: str) -> None:
    """All tables, as text, into `tables.txt`."""
    with (folder / "tables.txt").open("w") as file:
        console = Console(file=file, width=WIDTH)
        for table in tables(cases):
            console.print(table)
        console.print(machine)


def append(folder: Path, result: Measured, facts: Mapping[str, object]) -> None:
    """Add a raw line to `peers.jsonl`, at once, so that a run which is interrupted has not been in vain."""
    with (folder / "peers.jsonl").open("a") as file:
        file.write(line(result, facts))


def _table(
    title: str,
    headings: Iterable[str],
    cases: Cases,
    row: Callable[[Sequence[Measured]], Iterable[str]],
    caption: str | None = None,
) -> Table:
    """A row for each case; with its knobs, where they are what differs."""
    are_swept = len({name for name, _ in cases}) < len(cases)
    table = Table(title=title, caption=caption)
    table.add_column("case", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    if are_swept:
        table.add_column("with")
    for (name, knobs), told in cases.items():
        table.add_row(name, *row(told), *([knobs] if are_swept else []))
    return table


def _times_as_fast(
    cases: Cases, told: Sequence[Measured], rate: Rate, spread: Mapping[str, tuple[float, float]] | None = None
) -> list[str]:
    """A cell for each counterpart; with what single turns say, where that is given."""
    beside = ratios(cases, told, rate)
    cells = {name: f"{times:.1f} ×" for name, times in beside.items()}
    for name, (lowest, highest) in (spread or {}).items():
        cells[name] += f" ({lowest:.1f} – {highest:.1f})"
    return [cells.get(name, "") for name in _counterparts(told[0].name)] or [""] * len(_BESIDE)


def _counterparts(name: str) -> tuple[str, ...]:
    """Which of ours a case is compared with, in the order of the columns."""
    return () if name in ours.NAMES else ours.counterparts(tuned=_peer(name).is_tuned)


def _promiser(name: str) -> str:
    """Who makes the promise that holds for a case: itself, or all of its environment."""
    if name in ours.NAMES:
        return "ours"
    return name if name in PROMISES else _peer(name).environment


def _peer(name: str) -> Peer:
    return next(peer for peer in PEERS if peer.name == name)
