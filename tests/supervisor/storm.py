"""Starts COUNT parents one after another. Each parent forks without pause, and is stopped with SIGTERM: python -m
tests.supervisor.storm COUNT.

Prints one line of JSON: the count of each exit code. This process forks the parents, because hundreds of new
interpreters would take minutes to start.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from dispatcher.host.process_table import ChildContext
from dispatcher.supervisor.parent import Parent
from dispatcher.supervisor.supervised import Role
from dispatcher.telemetry import log
from tests.supervisor.fake_roles import Eager, FakeProcess, end, obey_signal

LONGEST_DELAY_SECONDS = 0.01
HANGS_AFTER_SECONDS = 20


def run_parent(folder: Path, sign_of_life: int) -> int:
    """Run a parent that forks continuously. One of its children runs until it is stopped."""
    # If the parent hangs, SIGALRM kills it. Nothing else causes this exit code.
    signal.alarm(HANGS_AFTER_SECONDS)

    def end_at_once(context: ChildContext) -> int:
        context.process_slot.mark_up()
        os.write(sign_of_life, b".")
        return end(FakeProcess("ends", "0", folder / "diary"), context)

    def listen(context: ChildContext) -> int:
        context.process_slot.mark_up()
        return obey_signal(FakeProcess("listens", "", folder / "diary"), context)

    busy = [Role(f"busy {number}", end_at_once, restarts=Eager()) for number in range(3)]
    roles = [*busy, Role("listens", listen), Role("relay", listen, stops_last=True)]
    return Parent(roles, run_dir=folder / "run", drain_seconds=60).run()


def start_and_stop(folder: Path) -> int:
    """Start one parent, stop it at a random moment, and return its exit code."""
    watch, sign_of_life = os.pipe()
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        os.close(watch)
        os._exit(run_parent(folder, sign_of_life))
    os.close(sign_of_life)
    os.read(watch, 1)
    stop_at = time.perf_counter() + random.uniform(0, LONGEST_DELAY_SECONDS)
    while time.perf_counter() < stop_at:
        pass
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    os.close(watch)
    return os.waitstatus_to_exitcode(status)


def main(count: int) -> None:
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory() as folder:  # noqa: PTH123
        log.configure("info", "json", nowhere)
        codes = Counter(start_and_stop(Path(folder)) for _ in range(count))
    print(json.dumps({"event": "storm.ended", "codes": codes}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
