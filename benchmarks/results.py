"""Writes and reads a run's results: the file `run.jsonl`, with one line per case and repetition."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.capacity import Figures
from benchmarks.figures import Spread

NAME: Final = "run.jsonl"

Record = Mapping[str, Any]
"""One line of the file: the fields of `Figures`, and the machine."""
Kind = tuple[tuple[str, Any], ...]
"""The identity of a case, equal for its repetitions in this and other runs."""


def record_of(figures: Figures, facts: Mapping[str, object]) -> Record:
    """Converts a result into the record that the file stores."""
    return {**asdict(figures), "machine": dict(facts)}


def lines_of(records: Iterable[Record]) -> str:
    """The file's content."""
    return "".join(json.dumps(record) + "\n" for record in records)


def read_records(folder: Path) -> list[Record]:
    """The results of an earlier run in a folder.

    Raises:
        ValueError: The folder contains no results; the text is for the user.
    """
    path = folder / NAME
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except OSError:
        raise ValueError(f"{path} cannot be read: give a folder that an earlier run wrote with --out") from None
    except ValueError:
        raise ValueError(f"{path} does not contain results of benchmarks/run.py") from None


def kind_of(record: Record) -> Kind:
    """The identity of a record's case, without the number of emails and the exact rate."""
    case = record["case"]
    rate = case["rate"] and "open loop"
    settings = tuple(map(tuple, case["settings"]))
    return tuple(
        sorted({"suppressed": 0, "hold_seconds": 0, **case, "emails": None, "rate": rate, "settings": settings}.items())
    )


def by_kind(records: Iterable[Record]) -> dict[Kind, list[Record]]:
    """The repetitions of each case, in order of first appearance."""
    grouped: dict[Kind, list[Record]] = {}
    for record in records:
        grouped.setdefault(kind_of(record), []).append(record)
    return grouped


def spread(records: Sequence[Record], figure: Callable[[Record], float | None]) -> Spread | None:
    """The spread of one figure over the repetitions; None if the figure was not measured."""
    known = [value for record in records if (value := figure(record)) is not None]
    return Spread.of(known) if known else None


def name_of(record: Record) -> str:
    """A short name for a record's case."""
    case = record["case"]
    words = [case["provider"], f"{case['workers']} worker{'s' if case['workers'] > 1 else ''}"]
    if case["rate"]:
        words.append("open loop")
    if case["latency_ms"]:
        words.append(f"{case['latency_ms']:g} ms")
    if case["prefetch"]:
        words.append(f"prefetch {case['prefetch']}")
    if case["preload"]:
        words.append(f"{case['preload']:,} in the tables")
    if case.get("suppressed"):
        words.append(f"{case['suppressed']:,} suppressed")
    if case.get("hold_seconds"):
        words.append(f"a snapshot is kept for {case['hold_seconds']} s")
    if case["has_faults"]:
        words.append("under kills")
    if case["sink"] != "python":
        words.append("C sink")
    if case["is_templated"]:
        words.append("templated")
    words += [f"{name}={value}" for name, value in case["settings"]]
    return ", ".join(words)
