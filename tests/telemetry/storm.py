"""Kills workers repeatedly and scrapes their metrics: `python -m tests.telemetry.storm <folder> <slots> <restarts>`.

Each process counts one email with the real code, and is then killed. Prints the results of the scrapes as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

from dispatcher.telemetry import metric_files, metrics
from tests.telemetry.pictures import SENT, samples


def main() -> None:
    folder, slots, restarts = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    metric_files.wipe(folder)
    living: dict[int, int] = {}
    seen, went_back, milliseconds = [0.0], 0, []
    for number in range(restarts):
        slot = number % slots
        if slot in living:
            os.waitpid(living[slot], 0)
        living[slot] = _start(folder, f"w{slot}")
        if number % 10 == 0:
            began_at = time.perf_counter()
            value = samples(folder).get(SENT, 0.0)
            milliseconds.append((time.perf_counter() - began_at) * 1000)
            went_back += value < seen[-1]
            seen.append(value)
    for pid in living.values():
        os.waitpid(pid, 0)
    report = {
        "expected": restarts,
        "counted": samples(folder)[SENT],
        "went_back": went_back,
        "scrapes": len(milliseconds),
        "quickest_scrape_ms": min(milliseconds),
        "median_scrape_ms": statistics.median(milliseconds),
        "longest_scrape_ms": max(milliseconds),
    }
    print(json.dumps(report))


def _start(folder: Path, slot: str) -> int:
    pid = os.fork()
    if pid == 0:
        metric_files.begin(folder, slot)
        metrics.EMAILS.add(1, "smtp", "accepted")
        metrics.SEND_SECONDS.observe(0.1, "smtp")
        os.kill(os.getpid(), signal.SIGKILL)
    return pid


if __name__ == "__main__":
    main()
