"""Measures CPU time and memory by process, from /proc before and after a run.

When a process exits and its parent has waited for it, the kernel adds the process's CPU time to the parent's. So the
sum of a process tree stays complete: a killed worker's time appears in the parent. Kernel work for a process (system
calls, loopback TCP) counts for that process. The work of kernel threads (writing dirty pages) is only in `machine`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as /proc/PID/stat shows it.

    Attributes:
        seconds: The CPU time of the process, plus the CPU time of its children that exited and were waited for.
    """

    pid: int
    parent: int
    seconds: float


def read_stat(text: str) -> Seen:
    """Parse a stat line (see proc_pid_stat(5)); the process's name may contain any character."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    return Seen(int(pid), int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_SECOND)


def attribute(seen: Mapping[int, Seen], roots: Mapping[str, int], role_of: Callable[[int], str]) -> dict[str, float]:
    """CPU seconds by name: the sum of each root's process tree; for the root `run`, the sum for each role of a child.

    Args:
        roots: The process at the top of each tree, by name.
        role_of: A child's role under `run`, by its pid.
    """
    children: dict[int, list[int]] = {}
    for process in seen.values():
        children.setdefault(process.parent, []).append(process.pid)

    def tree(pid: int) -> float:
        return seen[pid].seconds + sum(tree(child) for child in children.get(pid, ()))

    used: dict[str, float] = {}
    for name, root in roots.items():
        if root not in seen:
            continue
        if name != "run":
            used[name] = tree(root)
            continue
        used["parent"] = seen[root].seconds
        for child in children.get(root, ()):
            role = role_of(child)
            used[role] = used.get(role, 0.0) + tree(child)
    return used


def read_cpu(roots: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds by name, as `attribute` returns them, and `machine`: the total of all processes."""
    return {**attribute(_all_seen(), roots, role_of), "machine": _machine_seconds()}


def role_of(pid: int) -> str:
    """A process's role from its title: `worker 0` is a `worker`."""
    try:
        title = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").strip("\0 ")
    except OSError:
        return "parent"
    # A process that was just forked still has the parent's title.
    return title.removeprefix("dispatcher: ").split(" ")[0] if title.startswith("dispatcher: ") else "parent"


def is_alive(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    try:
        return bool((PROC / str(pid) / "cmdline").read_bytes())
    except OSError:
        return False


def pids_of_role(run_pid: int, role: str) -> list[int]:
    """The children of `dispatcher run` with this role."""
    return [pid for pid in children_of(run_pid) if role_of(pid) == role]


def children_of(pid: int) -> list[int]:
    """The processes whose parent is this process."""
    return [seen.pid for seen in _each_seen() if seen.parent == pid]


def pss_mb(pid: int) -> float | None:
    """A process's memory in MB, with shared pages counted in part; None if the kernel does not report the memory."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    kib = next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), None)
    return None if kib is None else kib * _KIB / 1e6


def median_pss_mb(pids: list[int]) -> float | None:
    """The median memory of these processes, in MB; None if the kernel does not report the memory."""
    known = [mb for pid in pids if (mb := pss_mb(pid)) is not None]
    return statistics.median(known) if known else None


def _all_seen() -> dict[int, Seen]:
    return {seen.pid: seen for seen in _each_seen()}


def _each_seen() -> Iterator[Seen]:
    for entry in os.scandir(PROC):
        if entry.name.isdigit():
            try:
                yield read_stat((PROC / entry.name / "stat").read_text(errors="replace"))
            except OSError:
                continue  # the process has exited


def _machine_seconds() -> float:
    """All CPU time except idle and waiting for the disk (see proc_stat(5)); user time already includes guests."""
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, *_ = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupts + soft_interrupts) / _TICKS_PER_SECOND
