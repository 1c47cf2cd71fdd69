"""The counts with which `instructions.py --check` compares, for each build of Python and PostgreSQL."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.callgrind import python_of

FILE: Final = Path(__file__).resolve().parent / "results" / "instructions" / "baseline.json"
MARGIN: Final = 1.02
IDLE_MARGIN: Final = 1.30
"""How often timers run in an idle second depends on the load of the machine: counts differed by a fifth."""
COMMAND: Final = ".venv/bin/python benchmarks/instructions.py --write-baseline --reason 'WHY'"
Figures = Mapping[str, Mapping[str, float]]
_BUILD: Final = """
import platform, sysconfig
arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
print(f"Python {platform.python_version()}, {platform.python_compiler()}, built {platform.python_build()[1]}", end="")
print(", optimised" if "--enable-optimizations" in arguments else "", end="")
"""


def build_of(tree: Path, postgresql: str) -> str:
    """The name of the builds with which a checkout is counted. Builds of the same version differ by a tenth."""
    words = [str(python_of(tree)), "-I", "-c", _BUILD]
    return f"{subprocess.run(words, capture_output=True, text=True, check=True).stdout}; PostgreSQL {postgresql}"


def findings(build: str, figures: Figures, file: Path = FILE) -> list[str]:
    """What is wrong with these counts, one sentence each; empty if no count is above the baseline's."""
    baseline = _read(file).get(build)
    if baseline is None:
        return [f"{file.name} has no counts for this build: {build}. Count the commit before your change: {COMMAND}"]
    wrong = []
    for part, by_process in figures.items():
        for process, count in by_process.items():
            before = baseline["figures"].get(part, {}).get(process)
            if before is None:
                wrong.append(f"{part}, {process}: {file.name} has no count. Add it: {COMMAND}")
            elif count > before * (margin := margin_of(part)):
                more = f"{count / before - 1:+.1%}, from {before:,.0f} to {count:,.0f} instructions"
                wrong.append(
                    f"{part}, {process}: {more}; {margin - 1:.0%} are allowed. "
                    f"If the change is worth this, move the baseline in the same commit: {COMMAND}"
                )
    return wrong


def margin_of(part: str) -> float:
    """The highest permitted ratio of a part's count to its baseline."""
    return IDLE_MARGIN if part.startswith("idle") else MARGIN


def write(build: str, figures: Figures, reason: str, file: Path = FILE) -> None:
    """Replaces the counts of these parts for this build, and keeps all other counts."""
    builds = _read(file)
    kept = builds.get(build, {"figures": {}})["figures"]
    counts = {part: {name: round(count) for name, count in by_process.items()} for part, by_process in figures.items()}
    builds[build] = {"reason": reason, "figures": {**kept, **counts}}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(builds, indent=2, sort_keys=True) + "\n")


def reasons(file: Path = FILE) -> Sequence[str]:
    """Why the counts of each build are what they are."""
    return [baseline["reason"] for baseline in _read(file).values()]


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found
