"""A process that writes metrics. It executes each line of its standard input as a command, answers, and exits at the
end of input.

Started as `python -m tests.telemetry.counting <folder> <slot> [octets]`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dispatcher.telemetry import log, metric_files, metrics

ROOT = Path(__file__).parent.parent.parent


class Process:
    """A process that writes metrics, controlled by the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, words: str) -> str:
        """Sends the process a command; returns the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(words, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self._process.kill()
        self._process.wait()


@contextmanager
def counting(folder: Path, slot: str = "w0", *, file_octets: int | None = None) -> Iterator[Process]:
    """Runs a process that writes metrics during the block. Beyond `file_octets`, writing fails, as on a full disk."""
    limit = [] if file_octets is None else [str(file_octets)]
    command = [sys.executable, "-m", "tests.telemetry.counting", str(folder), slot, *limit]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield Process(process)
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    log.configure("info", "json", sys.stderr)
    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
    metric_files.begin(Path(sys.argv[1]), sys.argv[2])
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, amount = line.strip().partition(" ")
        match word:
            case "add":
                metrics.EMAILS.add(float(amount), "smtp", "accepted")
            case "observe":
                metrics.SEND_SECONDS.observe(float(amount), "smtp")
            case "label":
                metrics.THROTTLES.add(1, f"provider-{amount}")
            case "breaker":
                metrics.BREAKERS.set(1, *amount.split())
            case "set":
                metrics.IN_FLIGHT.set(float(amount))
        print("counts" if metrics.EMAILS.is_bound else "silent", os.getpid(), flush=True)


if __name__ == "__main__":
    main()
