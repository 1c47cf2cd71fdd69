"""Measures the cost of metrics: runs the same case with and without metrics, in pairs, one run right after the other.

With metrics on, /metrics is scraped ten times as often as by Prometheus. The order within a pair alternates, so that a
drift of the machine favours neither side.

There are two figures: emails per second, and the CPU per email of our processes (parent, workers, relay and the scraped
monitor, including start and end). On a machine with other work or a slow disk, the CPU per email varies far less than
the rate. On a busy machine, the CPU per email determines the rate. Quote medians with their quartiles, the commit and
the machine.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rig import Case, Measured, measure
from dispatcher.dev import ports
from dispatcher.dev.servers import Servers, private_servers

SCRAPE_SECONDS = 1.5


class Scraper:
    """Reads /metrics repeatedly.

    Attributes:
        scrapes: How many reads succeeded.
    """

    def __init__(self, port: int) -> None:
        self.scrapes = 0
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._stop = threading.Event()

    def run(self) -> None:
        """Scrape until stopped."""
        while not self._stop.wait(SCRAPE_SECONDS):
            try:
                with urllib.request.urlopen(self._url, timeout=5) as reply:  # noqa: S310 - an address of ours
                    self.scrapes += bool(reply.read())
            except OSError:
                continue  # the run is starting or ending

    @contextmanager
    def running(self) -> Iterator[None]:
        """Scrape for the duration of the block."""
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def main() -> None:
    options = _options()
    case = Case(options.provider, options.workers, options.emails)
    with tempfile.TemporaryDirectory(prefix="dispatcher-benchmark-") as name:
        folder = Path(name)
        with private_servers(folder / "servers", progress=lambda words: print(words, file=sys.stderr)) as servers:
            measure(servers, case, folder / "warm-up")
            pairs = [_measure_pair(servers, case, folder, number) for number in range(options.pairs)]
    print(_summary("emails per second, on to off", [on.emails_per_second / off.emails_per_second for on, off in pairs]))
    print(_summary("CPU per email, on to off", [on.cpu_us / off.cpu_us for on, off in pairs]))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a pair.

    Attributes:
        cpu_us: CPU microseconds per email, of all processes of `dispatcher run`.
    """

    emails_per_second: float
    cpu_us: float


def _measure_pair(servers: Servers, case: Case, folder: Path, number: int) -> tuple[Run, Run]:
    runs = {}
    for is_on in (True, False) if number % 2 else (False, True):
        before = _children_cpu_seconds()
        measured = _measure(servers, case, folder / f"{number}-{is_on}", is_on=is_on)
        assert (measured.lost, measured.duplicates, measured.sent) == (0, 0, case.emails), measured
        seconds = _children_cpu_seconds() - before
        runs[is_on] = Run(measured.emails_per_second, seconds * 1e6 / case.emails)
    on, off = runs[True], runs[False]
    rates = f"off {off.emails_per_second:7,.0f}/s  on {on.emails_per_second:7,.0f}/s"
    print(f"pair {number + 1}: {rates}   CPU per email: off {off.cpu_us:.0f} us  on {on.cpu_us:.0f} us", flush=True)
    return on, off


def _children_cpu_seconds() -> float:
    """The CPU of all child processes that have exited, including their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _summary(what: str, ratios: list[float]) -> str:
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{what}: median {median:.3f}, quartiles {low:.3f} and {high:.3f}, {len(ratios)} pairs"


def _measure(servers: Servers, case: Case, folder: Path, *, is_on: bool) -> Measured:
    if not is_on:
        return measure(servers, case, folder, {"DISPATCHER_METRICS": "off", "DISPATCHER_METRICS_ADDRESS": "off"})
    (port,) = ports.choose(1)
    with Scraper(port).running():
        return measure(servers, case, folder, {"DISPATCHER_METRICS_ADDRESS": f"127.0.0.1:{port}"})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/metrics.py", description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="default: 7")
    parser.add_argument("--emails", type=int, default=10_000, metavar="N", help="per run; default: 10000")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--provider", choices=("capture", "smtp"), default="capture", help="default: capture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
