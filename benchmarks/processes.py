"""What the processes below this one have used of the processor, by what they are."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_NAMES: Final = {"postgres": "PostgreSQL", "beam.smp": "RabbitMQ"}
"""A process's own name, and what a table calls it."""


def cpu_seconds(more: Mapping[int, str]) -> dict[str, float]:
    """Seconds of CPU by name, of the private servers below this process and of some more.

    Args:
        more: Further processes, by id.
    """
    used: dict[str, float] = defaultdict(float)
    for pid in descendants(os.getpid()):
        name = more.get(pid) or _NAMES.get(_read(pid, "comm").strip())
        if name:
            used[name] += _seconds(pid)
    return used


def descendants(parent: int) -> Iterator[int]:
    """Every process that this one has started, and what these have started."""
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from descendants(child)


def _seconds(pid: int) -> float:
    """Its own, and those of its children that have ended."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return " 0" * 20  # it has ended
