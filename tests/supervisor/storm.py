"""Parents that get SIGTERM while they fork without pause, one after the other: python -m tests.supervisor.storm COUNT.

Prints one line of JSON: how often each exit code came. Forks the parents itself, because hundreds of interpreters take
minutes to start.
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
from tests.supervisor.toys import Eager, Toy, end, hear_signal

LONGEST_DELAY_SECONDS = 0.01
HANGS_AFTER_SECONDS = 20


def run_parent(folder: Path, sign_of_life: int) -> int:
    """A parent that has to fork all the time, beside a child that has to be told to stop."""
    # One that hangs ends by itself, with an exit code that nothing else gives.
    signal.alarm(HANGS_AFTER_SECONDS)

    def end_at_once(context: ChildContext) -> int:
        context.process_slot.mark_up()
        os.write(sign_of_life, b".")
        return end(Toy("ends", "0", folder / "diary"), context)

    def listen(context: ChildContext) -> int:
        context.process_slot.mark_up()
        return hear_signal(Toy("listens", "", folder / "diary"), context)

    busy = [Role(f"busy {number}", end_at_once, restarts=Eager()) for number in range(3)]
    roles = [*busy, Role("listens", listen), Role("relay", listen, stops_last=True)]
    return Parent(roles, run_dir=folder / "run", drain_seconds=60).run()


def strike(folder: Path) -> int:
    """Starts one parent, stops it at a random moment, and returns how it ended."""
    watch, sign_of_life = os.pipe()
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        os.close(watch)
        os._exit(run_parent(folder, sign_of_life))
    os.close(sign_of_life)
    os.read(watch, 1)
    strike_at = time.perf_counter() + random.uniform(0, LONGEST_DELAY_SECONDS)
    while time.perf_counter() < strike_at:
        pass
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    os.close(watch)
    return os.waitstatus_to_exitcode(status)


def main(count: int) -> None:
    """The command line."""
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory() as folder:  # noqa: PTH123
        log.configure("info", "json", nowhere)
        codes = Counter(strike(Path(folder)) for _ in range(count))
    print(json.dumps({"event": "storm.ended", "codes": codes}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
