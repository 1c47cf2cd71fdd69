"""Starts the parents of a test. Several parents may share a run directory, like two `dispatcher run` on one host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.supervisor.fake_roles import FAILING_FORKS, HANG_SECONDS
from tests.supervisor.program import Program


class ParentStarter:
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
        """Start a parent with these fake roles (see `fake_roles`), whose first `failing_forks` forks fail. `by` is a
        command that executes the parent's command line."""
        argv = [*by, sys.executable, "-m", "tests.supervisor.fake_roles", str(self._folder), str(drain_seconds), *roles]
        env = {"PATH": os.defpath, FAILING_FORKS: str(failing_forks), HANG_SECONDS: str(hang_seconds)}
        program = Program(argv, self._folder, f"parent-{len(self._programs)}", env=env, stdout=stdout)
        self._programs.append(program)
        return program

    def change_roles(self, *roles: str) -> None:
        """Set the roles that the next reload reads. Without roles, the reload fails because the file is empty."""
        (self._folder / "roles").write_text(" ".join(roles))

    def diary(self, word: str) -> list[tuple[str, int]]:
        """Name and pid of each process that wrote this word, in order."""
        return [(name, int(pid)) for name, pid, wrote in self._lines() if wrote == word]

    def words_in_order(self) -> list[tuple[str, str]]:
        """Name and word of each line, in order."""
        return [(name, word) for name, _pid, word in self._lines()]

    def words(self, prefix: str) -> list[str]:
        """All words in the diary that have this prefix, in order."""
        return [word for _name, _pid, word in self._lines() if word.startswith(prefix)]

    def _lines(self) -> list[list[str]]:
        """The words of each complete line. The last line may be incomplete, because a process may be writing it."""
        path = self._folder / "diary"
        *lines, _unfinished = path.read_text().split("\n") if path.exists() else [""]
        return [line.split() for line in lines]

    def destroy(self) -> None:
        """Kill all processes that still run."""
        for program in self._programs:
            program.destroy()
