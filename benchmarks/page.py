"""Reads the product's /metrics page, as Prometheus does."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cpu import is_alive

READY_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics page of a `dispatcher run`."""

    port: int

    @property
    def settings(self) -> dict[str, str]:
        """The settings with which `dispatcher run` serves this page."""
        return {"DISPATCHER_METRICS_ADDRESS": f"127.0.0.1:{self.port}"}

    def read(self) -> dict[str, float]:
        """The sum of each sample over all labels, by sample name; for histograms, the sums and the counts.

        Raises:
            OSError: The page cannot be read.
        """
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as reply:
            return totals(reply.read().decode())

    def await_ready(self, run_pid: int) -> None:
        """Wait until the page can be read.

        Raises:
            RuntimeError: The page could not be read in time, or the process has exited.
        """
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and is_alive(run_pid):
            try:
                self.read()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise RuntimeError(f"`dispatcher run` served no metrics within {READY_SECONDS:.0f} s")


def totals(text: str) -> dict[str, float]:
    """See `Page.read`."""
    summed: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                summed[sample.name] = summed.get(sample.name, 0.0) + sample.value
    return summed


def mean_of(histogram: str, before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """The mean of a histogram's observations between two readings; None if there were no observations."""
    count = after.get(f"{histogram}_count", 0.0) - before.get(f"{histogram}_count", 0.0)
    total = after.get(f"{histogram}_sum", 0.0) - before.get(f"{histogram}_sum", 0.0)
    return total / count if count else None
