"""One foreign command, run to its end."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dispatcher.errors import ServerUnavailable


def run(
    argv: Sequence[str | Path],
    *,
    purpose: str,
    remedy: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
) -> str:
    """What the command printed to stdout; the command does not outlive us, even if we are killed.

    Args:
        argv: Program and arguments.
        purpose: What it is for, as a verb phrase that fits behind "could not".
        remedy: What a person can do when it fails.
        env: Variables to set beside our own environment.
        cwd: Where to run it.
        stdin: What it reads.

    Raises:
        ServerUnavailable: The program is missing, or exited with a failure; holds the last lines that it printed.
    """
    if shutil.which(argv[0]) is None:
        raise ServerUnavailable(f"could not {purpose}: there is no {argv[0]} here.", remedy=remedy)
    finished = subprocess.run(
        [*_mortal(), *map(str, argv)],
        env={**os.environ, "LC_ALL": "C", **(env or {})},
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if finished.returncode != 0:
        words = last_lines(finished.stderr or finished.stdout, 4).replace("\n", " | ")
        raise ServerUnavailable(f"could not {purpose} (exit code {finished.returncode}): {words}.", remedy=remedy)
    return finished.stdout


def last_lines(text: str, count: int) -> str:
    """The last lines of a text that hold anything."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def tail(path: Path, count: int = 12) -> str:
    """The last lines of a log file, or a word on why there are none."""
    try:
        return last_lines(path.read_text(errors="replace"), count) or "(the log is empty)"
    except OSError:
        return "(no log was written)"


def _mortal() -> list[str]:
    """A prefix that has the kernel kill the command when the thread that started it is gone."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
