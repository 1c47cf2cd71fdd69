"""Kills workers of a `dispatcher run` with SIGKILL under load."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from benchmarks.cpu import pids_of_role

EVERY_SECONDS: Final = 2.0
MAX_KILLS: Final = 20
"""The maximum number of kills. The parent restarts dead workers with growing delays, which would otherwise dominate the
result."""


@contextmanager
def killing(run_pid: int, *, is_on: bool = True) -> Iterator[list[int]]:
    """Kill a worker every 2 seconds during the block. Yields a list, which grows by the process id of each killed
    worker."""
    killed: list[int] = []
    stop = threading.Event()

    def kill() -> None:
        while len(killed) < MAX_KILLS and not stop.wait(EVERY_SECONDS):
            if workers := pids_of_role(run_pid, "worker"):
                victim = random.choice(workers)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed.append(victim)

    thread = threading.Thread(target=kill)
    if is_on:
        thread.start()
    try:
        yield killed
    finally:
        stop.set()
        if is_on:
            thread.join()
