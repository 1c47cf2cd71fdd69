"""The tables and the raw lines of a run."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks.peers.measuring import Measured, median_rate, median_steady_rate
from benchmarks.peers.ours import NAME as OURS
from benchmarks.peers.roster import PEERS, PROMISES

Cases = Mapping[tuple[str, str], Sequence[Measured]]
"""The repetitions of each case, by its name and its knobs in words."""

BOOKS: Final = ("missing", "duplicates", "held", "unrecorded")
_FIGURES: Final = ("emails/s", "range", "ours is", "steady/s", "ours is", "CPU µs", "servers' µs", "processes")
_ENVIRONMENTS: Final = {OURS: OURS, **{peer.name: peer.environment for peer in PEERS}}


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
    """How fast each is, what it costs, and its books; where one has several knobs, which."""
    are_swept = len({name for name, _ in cases}) < len(cases)
    table = Table(title="Emails per second, median of the repetitions (lowest – highest)")
    table.add_column("case", no_wrap=True)
    for heading in (*_FIGURES, *BOOKS):
        table.add_column(heading, justify="right")
    if are_swept:
        table.add_column("with")
    ours = next((told for (name, _), told in cases.items() if name == OURS), None)
    for (name, knobs), told in cases.items():
        rates = [result.emails_per_second for result in told]
        beside = ours if name != OURS else None
        table.add_row(
            name,
            f"{median_rate(told):,.0f}",
            f"{min(rates):,.0f} – {max(rates):,.0f}",
            f"{median_rate(beside) / median_rate(told):.1f} ×" if beside else "",
            f"{median_steady_rate(told):,.0f}",
            f"{median_steady_rate(beside) / median_steady_rate(told):.1f} ×" if beside else "",
            f"{statistics.median(result.cpu_microseconds for result in told):,.0f}",
            f"{statistics.median(result.servers_cpu_microseconds for result in told):,.0f}",
            str(max(result.processes for result in told)),
            *(str(sum(getattr(result, book) for result in told)) for book in BOOKS),
            *([knobs] if are_swept else []),
        )
    return table


def promises(cases: Cases) -> Table:
    """What each does about the things that go wrong."""
    table = Table(title="What each promises", show_lines=True)
    for heading in ("", "email and message stand or fall together", "a worker is killed (kill -9)", "where it says so"):
        table.add_column(heading)
    for environment in dict.fromkeys(_ENVIRONMENTS[name] for name, _ in cases):
        promise = PROMISES[environment]
        table.add_row(environment, promise.enqueue, promise.kill, promise.source)
    return table


def line(result: Measured, facts: Mapping[str, object]) -> str:
    """One line of JSON."""
    return json.dumps({**dataclasses.asdict(result), "machine": facts}) + "\n"


def begin(folder: Path) -> None:
    """An empty `peers.jsonl`: what stands there is one run's, as in the plots beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.jsonl").write_bytes(b"")


def append(folder: Path, result: Measured, facts: Mapping[str, object]) -> None:
    """Add a raw line to `peers.jsonl`, at once, so that a run which is interrupted has not been in vain."""
    with (folder / "peers.jsonl").open("a") as file:
        file.write(line(result, facts))
