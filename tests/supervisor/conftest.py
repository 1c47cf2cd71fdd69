"""Starts parents with fake roles, and kills them after the test."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.supervisor.program import Program


class ParentStarter:
    """Starts parents that share one run directory, like two `dispatcher run` on one host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.programs: list[Program] = []

    def start(self, *roles: str, stdout: Path | None = None, by: Sequence[str] = (), **options: float) -> Program:
        """Start a parent with these fake roles and options (see `fake_roles`). `by` is a command that executes the
        parent's command line."""
        given = json.dumps({"drain_seconds": 20, "hang_seconds": 0, "failing_forks": 0, **options})
        argv = [*by, sys.executable, "-m", "tests.supervisor.fake_roles", str(self._folder), given, *roles]
        name = f"parent-{len(self.programs)}"
        program = Program(argv, self._folder, name, env={"PATH": os.defpath}, stdout=stdout)
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
    opened = ParentStarter(tmp_path)
    yield opened
    for program in opened.programs:
        program.destroy()


def stop(parent: Program) -> None:
    """Stop a parent; asserts that nothing had to be killed and that no process is left."""
    parent.send(signal.SIGTERM)
    assert parent.await_exit() == 0
    assert not parent.members()
