"""What counts: counters, gauges and histograms, declared at import and silent until a process binds them to its files.

A meter that is not bound costs a comparison. Nothing here reads a file or loads a library at import, so a meter may be
used anywhere; which process counts, and where, is `metric_files`' business. Cells are kept per combination of labels:
looking one up is a dictionary's work, and adding to it a write into a memory map.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar, Final, Protocol

Labels = tuple[str, ...]

INFINITE: Final = float("inf")


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
        is_bound: Whether anything is counted in this process.
    """

    kind: ClassVar[str]
    mode: ClassVar[str] = ""

    def __init__(self, name: str, about: str, labels: Labels = (), known: Iterable[Labels] = ()) -> None:
        self.name = name
        self.about = about
        self.labels = labels
        self.known = tuple(known) if labels else ((),)
        self.is_bound = False
        self._make_cell: MakeCell | None = None

    @property
    def samples(self) -> dict[str, Labels]:
        """The names of the samples that it consists of, each with its label names."""
        return {self.name: self.labels}

    def bind(self, make_cell: MakeCell | None) -> None:
        """Counts in these cells from now on; None: counts nowhere."""
        self._make_cell = make_cell
        self.is_bound = make_cell is not None
        self._forget_cells()
        if self.is_bound:
            for labels in self.known:
                self._create(labels)

    def _cell(self, sample: str, names: Labels, values: Labels) -> Cell:
        assert self._make_cell is not None
        return self._make_cell(self, sample, names, values)

    def _forget_cells(self) -> None:
        raise NotImplementedError

    def _create(self, labels: Labels) -> object:
        raise NotImplementedError


class _SingleMeter(Meter):
    """One cell per combination of labels."""

    def __init__(self, name: str, about: str, labels: Labels = (), known: Iterable[Labels] = ()) -> None:
        super().__init__(name, about, labels, known)
        self._cells: dict[Labels, Cell] = {}

    def _forget_cells(self) -> None:
        self._cells = {}

    def _create(self, labels: Labels) -> Cell:
        cell = self._cells[labels] = self._cell(self.name, self.labels, labels)
        return cell


class Counter(_SingleMeter):
    """Only ever grows; continues where the slot's last process ended."""

    kind = "counter"

    def add(self, amount: float, *labels: str) -> None:
        """Adds to it."""
        if self.is_bound and amount:
            (self._cells.get(labels) or self._create(labels)).inc(amount)


class Gauge(_SingleMeter):
    """How much there is now, summed over living processes; gone with its process."""

    kind = "gauge"
    mode = "livesum"

    def set(self, value: float, *labels: str) -> None:
        """Replaces this process's share."""
        if self.is_bound:
            (self._cells.get(labels) or self._create(labels)).set(value)


class Histogram(Meter):
    """How values are distributed; continues where the slot's last process ended.

    Attributes:
        bounds: Upper bounds of the buckets, the last one infinite.
    """

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float], labels: Labels = ()) -> None:
        super().__init__(name, about, labels)
        self.bounds = (*bounds, INFINITE)
        self._cells: dict[Labels, tuple[Cell, list[Cell]]] = {}

    @property
    def samples(self) -> dict[str, Labels]:
        """The names of the samples that it consists of, each with its label names."""
        return {f"{self.name}_sum": self.labels, f"{self.name}_bucket": (*self.labels, "le")}

    def observe(self, value: float, *labels: str) -> None:
        """Notes one value."""
        if self.is_bound:
            total, buckets = self._cells.get(labels) or self._create(labels)
            total.inc(max(0.0, value))
            buckets[bisect_left(self.bounds, value)].inc(1)

    def observe_all(self, values: Iterable[float], *labels: str) -> None:
        """Notes many values with a write per bucket, not per value."""
        if not self.is_bound:
            return
        values = list(values)
        if not values:
            return
        total, buckets = self._cells.get(labels) or self._create(labels)
        # A clock that was set back must not take the sum back.
        total.inc(max(0.0, sum(values)))
        for bucket, count in Tally(map(partial(bisect_left, self.bounds), values)).items():
            buckets[bucket].inc(count)

    def _forget_cells(self) -> None:
        self._cells = {}

    def _create(self, labels: Labels) -> tuple[Cell, list[Cell]]:
        names = (*self.labels, "le")
        total = self._cell(f"{self.name}_sum", self.labels, labels)
        buckets = [self._cell(f"{self.name}_bucket", names, (*labels, bound_text(bound))) for bound in self.bounds]
        self._cells[labels] = total, buckets
        return total, buckets


def bound_text(bound: float) -> str:
    """A bucket's upper bound as its label `le` has it."""
    return "+Inf" if bound == INFINITE else repr(float(bound))
