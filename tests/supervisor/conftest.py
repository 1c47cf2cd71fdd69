"""Starts parents with fake roles, and kills them after the test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.supervisor.fake_roles import FAILING_FORKS, HANG_SECONDS
from tests.supervisor.program import Program


class ParentStarter:
    """Starts parents that share one run directory, like two `dispatcher run` on one host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.programs: list[Program] = []

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
        program = Program(argv, self._folder, f"parent-{len(self.programs)}", env=env, stdout=stdout)
        self.programs.append(program)
        return program

    def change_roles(self, *roles: str) -> None:
        """Set the roles that the next reload reads. Without roles, the reload fails because the file is empty."""
        (self._folder / "roles").write_text(" ".join(roles))

    def lines(self) -> list[tuple[str, int, str]]:
        """The complete lines of the diary: name, pid, word. A process may be writing the last line."""
        path = self._folder / "diary"
        *lines, _unfinished = path.read_text().split("\n") if path.exists() else [""]
        return [(name, int(pid), word) for name, pid, word in map(str.split, lines)]

    def diary(self, word: str) -> list[tuple[str, int]]:
        """Name and pid of each process that wrote this word, in order."""
        return [(name, pid) for name, pid, wrote in self.lines() if wrote == word]


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[ParentStarter]:
    """Starts this test's parents."""
    opened = ParentStarter(tmp_path)
    yield opened
    for program in opened.programs:
        program.destroy()


def stop(parent: Program) -> None:
    """Stop a parent; asserts that nothing had to be killed and that no process is left."""
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0
    assert not parent.members()
