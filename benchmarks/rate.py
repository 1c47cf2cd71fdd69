"""Measures how exactly two hosts together keep a maximum rate: `python benchmarks/rate.py --ceiling 200 --seconds 20`.

Two `dispatcher run`, one with two workers and one with one worker, have separate run directories. They send to one SMTP
double with the same `DISPATCHER_SMTP_MAX_PER_SECOND`. The benchmark counts each second's emails in the double's ledger.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/rate.py`

from benchmarks.rig import Case, Stage, stage, wait_until
from dispatcher.dev.acceptance_ledger import read_ledger
from dispatcher.dev.servers import private_servers

SETTLE_SECONDS = 3


def main() -> None:
    """The command line."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/rate.py", description=summary, epilog=details)
    parser.add_argument("--ceiling", type=float, default=200.0, metavar="N", help="emails per second; default: 200")
    parser.add_argument("--seconds", type=int, default=20, metavar="N", help="measured; default: 20")
    options = parser.parse_args()
    console = Console(stderr=True)
    emails = int(options.ceiling * (options.seconds + SETTLE_SECONDS + 3))
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
        stage(servers, Case("smtp", 2, emails), Path(folder) / "case") as scene,
    ):
        rates = _rates(scene, options.ceiling, options.seconds, console)
    mean = statistics.mean(rates)
    off = (mean / options.ceiling - 1) * 100
    Console().print(f"ceiling {options.ceiling:g}/s, measured {mean:.1f}/s over {len(rates)} s ({off:+.1f} %)")
    Console().print(f"second by second: lowest {min(rates)}, highest {max(rates)}")


def _rates(scene: Stage, ceiling: float, seconds: int, console: Console) -> list[int]:
    ceiling_setting = {"DISPATCHER_SMTP_MAX_PER_SECOND": str(ceiling)}
    with contextlib.ExitStack() as stack:
        for host, workers in (("one", 2), ("two", 1)):
            stack.enter_context(scene.running(f"host-{host}", {**ceiling_setting, "DISPATCHER_WORKERS": str(workers)}))
        ledger = scene.folder / "sink" / "ledger.jsonl"
        wanted = int(ceiling * (seconds + SETTLE_SECONDS + 1))
        console.log(f"two hosts send {wanted} emails at {ceiling:g}/s")
        wait_until(lambda: len(read_ledger(ledger).entries) >= wanted, seconds * 3 + 30)
        instants = [entry.accepted_at for entry in read_ledger(ledger).entries]
    begin = min(instants) + SETTLE_SECONDS
    counted = Counter(int(instant - begin) for instant in instants if instant >= begin)
    return [counted[second] for second in range(seconds)]


if __name__ == "__main__":
    main()
