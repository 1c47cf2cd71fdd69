"""Where a test's parents live: several may share one run directory, as two `dispatcher run` of a host would."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.supervisor.program import Program
from tests.supervisor.toys import FAILING_FORKS, HANG_SECONDS


class Nursery:
    """Starts parents that share one run directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs: list[Program] = []

    def start(
        self,
        *roles: str,
        drain_seconds: float = 20,
        failing_forks: int = 0,
        stdout: Path | None = None,
        by: Sequence[str] = (),
        hang_seconds: float = 0,
    ) -> Program:
        """A parent with these toys (see `toys`), perhaps on a host that cannot fork at first.

        Args:
            by: What starts it: a program that executes its arguments.
        """
        argv = [*by, sys.executable, "-m", "tests.supervisor.toys", str(self._folder), str(drain_seconds), *roles]
        env = {"PATH": os.defpath, FAILING_FORKS: str(failing_forks), HANG_SECONDS: str(hang_seconds)}
        program = Program(argv, self._folder, f"parent-{len(self._programs)}", env=env, stdout=stdout)
        self._programs.append(program)
        return program

    def change_roles(self, *roles: str) -> None:
        """What the next reload finds; nothing is a mistake."""
        (self._folder / "roles").write_text(" ".join(roles))

    def diary(self, word: str) -> list[tuple[str, int]]:
        """Name and pid of each toy that wrote this word, in order."""
        return [(name, int(pid)) for name, pid, wrote in self._lines() if wrote == word]

    def words_in_order(self) -> list[tuple[str, str]]:
        """Name and word of each line, in order."""
        return [(name, word) for name, _pid, word in self._lines()]

    def words(self, prefix: str) -> list[str]:
        """Everything in the diary that begins so, in order."""
        return [word for _name, _pid, word in self._lines() if word.startswith(prefix)]

    def _lines(self) -> list[list[str]]:
        """The words of each line that is finished: toys write while we read."""
        path = self._folder / "diary"
        *lines, _unfinished = path.read_text().split("\n") if path.exists() else [""]
        return [line.split() for line in lines]

    def destroy(self) -> None:
        """Ends what is left."""
        for program in self._programs:
            program.destroy()
