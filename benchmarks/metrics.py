"""What metrics cost: the same case with and without them, in pairs, one right after the other.

With them, /metrics is scraped all the while, ten times as often as a Prometheus does. The order within a pair changes
from pair to pair, so that what drifts favours neither. Quote the median ratio, with commit and machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rig import Case, Measured, measure
from dispatcher.dev import ports
from dispatcher.dev.servers import Servers, private_servers

SCRAPE_SECONDS = 1.5


class Scraper:
    """Asks for /metrics again and again.

    Attributes:
        scrapes: How often it was answered.
    """

    def __init__(self, port: int) -> None:
        self.scrapes = 0
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._stop = threading.Event()

    def run(self) -> None:
        """Scrapes until it is stopped."""
        while not self._stop.wait(SCRAPE_SECONDS):
            try:
                with urllib.request.urlopen(self._url, timeout=5) as reply:  # noqa: S310 - an address of ours
                    self.scrapes += bool(reply.read())
            except OSError:
                continue  # the run is only starting, or ends

    @contextmanager
    def running(self) -> Iterator[None]:
        """Scrapes for the length of a block."""
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
            ratios = []
            measure(servers, case, folder / "warm-up")
            for pair in range(options.pairs):
                rates = {}
                for is_on in (True, False) if pair % 2 else (False, True):
                    measured = _measure(servers, case, folder / f"{pair}-{is_on}", is_on=is_on)
                    assert (measured.lost, measured.duplicates, measured.sent) == (0, 0, case.emails), measured
                    rates[is_on] = measured.emails_per_second
                ratios.append(rates[True] / rates[False])
                words = f"off {rates[False]:7,.0f}/s  on {rates[True]:7,.0f}/s  ratio {ratios[-1]:.3f}"
                print(f"pair {pair + 1}: {words}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}: metrics cost {100 * (1 - statistics.median(ratios)):.1f} %")


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
