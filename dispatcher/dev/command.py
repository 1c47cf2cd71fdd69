"""Runs external commands."""

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
    """Runs a command and returns its stdout. If this process is killed, the kernel kills the command, too.

    `purpose` is a verb phrase for the error, "could not <purpose>"; `env` adds to the variables of this process. Raises
    ServerUnavailable, with the last lines that the program printed, if the program is missing or failed.
    """
    if shutil.which(argv[0]) is None:
        raise ServerUnavailable(f"could not {purpose}: {argv[0]} is not installed.", remedy=remedy)
    finished = subprocess.run(
        [*_die_with_parent(), *map(str, argv)],
        env={**os.environ, "LC_ALL": "C", **(env or {})},
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if finished.returncode != 0:
        output = last_lines(finished.stderr or finished.stdout, 4).replace("\n", " | ")
        raise ServerUnavailable(f"could not {purpose} (exit code {finished.returncode}): {output}.", remedy=remedy)
    return finished.stdout


def last_lines(text: str, count: int) -> str:
    """The last `count` lines of a text, not counting blank lines."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def tail(path: Path, count: int = 12) -> str:
    """The last lines of a log file. If there are none, a note such as `(the log is empty)`."""
    try:
        return last_lines(path.read_text(errors="replace"), count) or "(the log is empty)"
    except OSError:
        return "(no log was written)"


def _die_with_parent() -> list[str]:
    """Words to put before a command, so that the kernel kills the command when the thread that started it exits. Empty
    without setpriv: the command may then run longer than this process."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
