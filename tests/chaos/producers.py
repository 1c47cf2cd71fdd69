"""The producers of a storm: processes that enqueue, may be killed, and are restarted until every call has an answer."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Final
from uuid import UUID

from dispatcher.dev.oracle import Answer
from tests.chaos.plan import HarnessFailed, StormPlan
from tests.chaos.producer import read_notes
from tests.supervisor.program import Program

PRODUCERS: Final = 3
SHARED_FRACTION: Final = 0.1
"""The share of emails with shared keys. Every producer enqueues each shared key."""


class Producers:
    def __init__(self, folder: Path, database_url: str, plan: StormPlan) -> None:
        self._folder = folder
        self._env = {"PATH": os.defpath, "DISPATCHER_DATABASE_URL": database_url}
        began_at = time.time()
        self._words = (
            "--began-at", str(began_at), "--until", str(began_at + plan.seconds),
            "--rate", str(plan.rate * (1 - SHARED_FRACTION) / PRODUCERS),
            "--shared-rate", str(plan.rate * SHARED_FRACTION),
            "--channel", plan.channel, "--recipients", str(plan.recipients),
        )  # fmt: skip
        self._starts = 0
        self._programs = {name: self._start(name) for name in (f"p{number}" for number in range(PRODUCERS))}

    def pids(self) -> list[int]:
        return [program.pid for program in self._programs.values() if program.exit_code is None]

    def restart_killed(self) -> None:
        for name, program in self._programs.items():
            if program.exit_code == -signal.SIGKILL:
                self._programs[name] = self._start(name)
            elif program.exit_code:
                raise HarnessFailed(f"producer {name} ended with {program.exit_code}:\n{program.words[-2000:]}")

    @property
    def are_done(self) -> bool:
        return all(program.exit_code == 0 for program in self._programs.values())

    def answers(self) -> list[Answer]:
        """Every answer of any producer. Leaves out emails that had expired before they were enqueued."""
        return [
            Answer(key, UUID(email_id), acceptance)
            for name in self._programs
            for key, email_id, acceptance in read_notes(self._file(name)).answers
            if acceptance != "expired"
        ]

    def keys(self) -> frozenset[str]:
        return frozenset(key for name in self._programs for key in read_notes(self._file(name)).keys)

    def destroy(self) -> None:
        for program in self._programs.values():
            program.destroy()

    def _start(self, name: str) -> Program:
        self._starts += 1
        words = ("--name", name, "--file", str(self._file(name)), *self._words)
        argv = [sys.executable, "-m", "tests.chaos.producer", *words]
        return Program(argv, self._folder, f"producer-{self._starts}", env=self._env)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.notes"
