"""Takes every figure of README.md and docs/performance.md, one part after the other: `python benchmarks/measure.py`.

Each part writes the folder benchmarks/results/PART. A part that was already measured at this commit is not measured
again, so after an interruption, call the command again. If a part fails, the others are still measured. At the end, the
command writes the pages (see pages.py). Commit all changes first: a figure needs a commit. Run nothing else on the
machine at the same time.

    python benchmarks/measure.py                   all parts
    python benchmarks/measure.py peers floor       only these parts
    python benchmarks/measure.py --again bundles   also a part that was measured at this commit
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/measure.py`

from benchmarks import pages
from benchmarks.machine import machine

OUT: Final = "--out"
BACKLOG: Final = "run.py --workers 2"
PRINTED: Final = "printed.txt"
COMMIT: Final = "commit "
"""How the first line of `PRINTED` begins."""


@dataclass(frozen=True, slots=True)
class Part:
    """A command.

    Attributes:
        command: The program in benchmarks/, and its options.
        minutes: How long it takes on two idle cores, with three repetitions.
        has_folder: Whether it writes raw figures with --out. If not, we keep what it prints.
        repeats: Whether it has --repeat.
    """

    command: str
    minutes: int
    has_folder: bool = True
    repeats: bool = True


PARTS: Final = {
    "sendgrid": Part("run.py --workers 1,2", 1),
    "bundles": Part(
        f"{BACKLOG} --emails 30000 --set DISPATCHER_BUNDLE_EMAILS=1,16 --set DISPATCHER_PREFETCH=256,512", 2
    ),
    "latency": Part(f"{BACKLOG} --rate 30% --duration 15", 2),
    "peers": Part("peers/run.py", 13),
    "floor": Part("floor.py", 1),
    "floor-one-worker": Part("floor.py --workers 1", 1),
    "floor-bundles": Part("floor.py --bundle 16 --prefetch 512", 1),
    "smtp": Part("run.py --provider smtp --sink c --workers 1,2 --emails 8000", 1),
    "coalesced": Part(
        f"{BACKLOG} --templated --emails 40000 --prefetch 1024 --set DISPATCHER_BUNDLE_EMAILS=16"
        " --set DISPATCHER_BULK_CALL_EMAILS=1,100",
        2,
    ),
    "coalesced-defaults": Part(f"{BACKLOG} --templated --set DISPATCHER_BULK_CALL_EMAILS=1,100", 1),
    "coalesced-ses": Part(
        f"{BACKLOG} --provider ses --templated --emails 5000 --set DISPATCHER_BULK_CALL_EMAILS=1,50", 1
    ),
    "slow-provider": Part("run.py --workers 1,2 --latency-ms 50 --prefetch 32 --emails 10000", 2),
    "million": Part(f"{BACKLOG} --preload 0,1000000", 6),
    "idle": Part("idle.py", 3, repeats=False),
    "commits": Part("commits.py", 6, has_folder=False),
    "schedule": Part("schedule.py", 2, has_folder=False),
    "events": Part("events.py --ahead --seconds 4", 3, has_folder=False),
    "enqueue": Part("enqueue.py --seconds 5 --repeat 3", 2, has_folder=False),
}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _options(arguments)
    console = Console(stderr=True)
    commit = str(machine()["commit"])
    if commit.endswith("+"):
        console.print("The checkout has uncommitted changes, so the figures would have no commit. Commit first.")
        return 2
    wanted = [name for name in options.parts if options.again or measured_at(pages.RESULTS / name) != commit]
    failed = []
    for number, name in enumerate(wanted):
        rest = sum(PARTS[each].minutes for each in wanted[number:])
        console.log(f"{name}: about {PARTS[name].minutes} of {rest} minutes")
        if not take(PARTS[name], pages.RESULTS / name, commit, options.repeat):
            failed.append(name)
    pages.main()
    if failed:
        console.print(f"Not measured: {', '.join(failed)}. Their earlier figures are kept. Call the command again.")
    return 1 if failed else 0


def measured_at(folder: Path) -> str | None:
    """The commit of a folder's figures; None if it has none."""
    for file in sorted(folder.glob("*.jsonl")):
        if line := file.read_text().partition("\n")[0]:
            return str(json.loads(line)["machine"]["commit"])
    printed = folder / PRINTED
    return printed.read_text().partition("\n")[0].removeprefix(COMMIT) if printed.exists() else None


def take(part: Part, folder: Path, commit: str, repeat: int | None = None) -> bool:
    """Replaces the figures in a folder if the part's command succeeds; returns whether it did."""
    new = folder.with_name(f".{folder.name}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    program, *words = part.command.split()
    call = [sys.executable, str(Path(__file__).resolve().parent / program), *words]
    if part.has_folder:
        call += [OUT, str(new)] + (["--repeat", str(repeat)] if repeat and part.repeats else [])
    done = subprocess.run(call, check=False, stdout=None if part.has_folder else subprocess.PIPE, text=True)
    if not part.has_folder:
        (new / PRINTED).write_text(f"{COMMIT}{commit}\n$ benchmarks/{part.command}\n{done.stdout}")
    if done.returncode == 0:
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    shutil.rmtree(new, ignore_errors=True)
    return done.returncode == 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    minutes = "\n".join(
        f"    {name:20} {part.minutes:2} min   benchmarks/{part.command}" for name, part in PARTS.items()
    )
    total = sum(part.minutes for part in PARTS.values())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"parts ({total} minutes in all, with three repetitions):\n{minutes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help="default: all parts")
    parser.add_argument("--again", action="store_true", help="measure parts again that were measured at this commit")
    parser.add_argument("--repeat", type=int, metavar="N", help="repetitions of each case; default: each command's")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(PARTS)
    return options


if __name__ == "__main__":
    sys.exit(main())
