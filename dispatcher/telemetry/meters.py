"""What counts: counters, gauges and histograms, silent until a process binds them to its files.

A meter that is not bound costs a comparison. Nothing here reads a file or loads a library, so a meter may be used
anywhere; which process counts, and where, is `metric_files`' business. Cells are kept per combination of labels:
looking one up is a dictionary's work, and adding to it a write into a memory map.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import ClassVar, Final, Protocol

Labels = tuple[str, ...]

INFINITE: Final = float("inf")


class Panel(StrEnum):
    """The rows of the dashboard, deploy/grafana-dashboard.json, in which a metric has a panel."""

    SENDING = "Sending"
    DATABASE = "Queue and database"
    TROUBLE = "Failures and recovery"
    HOSTS = "Hosts"
    API = "HTTP API and bulk calls"


class Cell(Protocol):
    """One number in a file."""

    def inc(self, amount: float) -> None:
        """Adds to it."""

    def set(self, value: float) -> None:
        """Replaces it."""


MakeCell = Callable[["Meter", str, Sequence[str], Sequence[str]], Cell]
"""From a meter, a sample's name, label names and label values to the sample's cell."""


class Meter:
    """Something that processes count.

    Attributes:
        kind: The library's word for it, with which its files' names begin.
        labels: Label names; their values come from closed vocabularies, never from an email.
        known: Combinations of labels that exist from the start, at zero, so that a first event shows as an increase.
        panel: The row of the dashboard that it is shown in; only meters with one are counted by our processes.
        is_bound: Whether anything is counted in this process.
    """

    kind: ClassVar[str]
    declared: ClassVar[list[Meter]] = []
    """All with a panel, in the order of their declaration."""

    def __init__(
        self, name: str, about: str, labels: Labels = (), known: Iterable[Labels] = (), *, panel: Panel | None = None
    ) -> None:
        self.name = name
        self.about = about
        self.labels = labels
        self.known = tuple(known) if labels else ((),)
        self.panel = panel
        self.is_bound = False
        self._make_cell: MakeCell | None = None
        self._cells: dict[Labels, list[Cell]] = {}
        if panel:
            self.declared.append(self)

    @property
    def samples(self) -> dict[str, Labels]:
        """The names of the samples that it consists of, each with its label names."""
        return {self.name: self.labels}

    def bind(self, make_cell: MakeCell | None) -> None:
        """Counts in these cells from now on; None: counts nowhere."""
        self._make_cell = make_cell
        self.is_bound = make_cell is not None
        self._cells = {}
        for labels in self.known if self.is_bound else ():
            self._create(labels)

    def _create(self, labels: Labels) -> list[Cell]:
        make_cell = self._make_cell
        assert make_cell is not None
        cells = [make_cell(self, *each) for each in self._numbers(labels)]
        self._cells[labels] = cells
        return cells

    def _numbers(self, labels: Labels) -> Iterator[tuple[str, Labels, Labels]]:
        """What it has cells for: a sample, its label names and values each."""
        yield self.name, self.labels, labels


class Counter(Meter):
    """Only ever grows; continues where the slot's last process ended."""

    kind = "counter"

    def add(self, amount: float, *labels: str) -> None:
        """Adds to it."""
        if self.is_bound and amount:
            (self._cells.get(labels) or self._create(labels))[0].inc(amount)


class Gauge(Meter):
    """How much there is now, summed over living processes; gone with its process."""

    kind = "gauge"

    def set(self, value: float, *labels: str) -> None:
        """Replaces this process's share."""
        if self.is_bound:
            (self._cells.get(labels) or self._create(labels))[0].set(value)


class Histogram(Meter):
    """How values are distributed; continues where the slot's last process ended.

    Attributes:
        bounds: Upper bounds of the buckets, the last one infinite.
    """

    kind = "histogram"

    def __init__(
        self, name: str, about: str, bounds: Sequence[float], labels: Labels = (), *, panel: Panel | None = None
    ) -> None:
        self.bounds = (*bounds, INFINITE)
        super().__init__(name, about, labels, panel=panel)

    @property
    def samples(self) -> dict[str, Labels]:
        """The names of the samples that it consists of, each with its label names."""
        return {f"{self.name}_sum": self.labels, f"{self.name}_bucket": (*self.labels, "le")}

    def observe(self, value: float, *labels: str) -> None:
        """Notes one value."""
        if self.is_bound:
            total, *buckets = self._cells.get(labels) or self._create(labels)
            total.inc(max(0.0, value))
            buckets[bisect_left(self.bounds, value)].inc(1)

    def observe_all(self, values: Iterable[float], *labels: str) -> None:
        """Notes many values with a write per bucket, not per value."""
        if not self.is_bound or not (values := list(values)):
            return
        total, *buckets = self._cells.get(labels) or self._create(labels)
        # A clock that was set back must not take the sum back.
        total.inc(max(0.0, sum(values)))
        for bucket, count in Tally(map(partial(bisect_left, self.bounds), values)).items():
            buckets[bucket].inc(count)

    def _numbers(self, labels: Labels) -> Iterator[tuple[str, Labels, Labels]]:
        yield f"{self.name}_sum", self.labels, labels
        for bound in self.bounds:
            text = "+Inf" if bound == INFINITE else repr(float(bound))
            yield f"{self.name}_bucket", (*self.labels, "le"), (*labels, text)
