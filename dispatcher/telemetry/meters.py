"""Counters, gauges and histograms (meters). A meter counts nothing until a process binds it to a file.

A call of an unbound meter costs one comparison. This module reads no file and loads no library, so any code may use a
meter. `metric_files` decides which process counts, and in which files. A meter keeps one value per combination of label
values. A dictionary lookup finds the value, and a write to a memory map changes it.
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
    """The rows of the dashboard (deploy/grafana-dashboard.json), each with panels for metrics."""

    SENDING = "Sending"
    DATABASE = "Queue and database"
    TROUBLE = "Failures and recovery"
    HOSTS = "Hosts"
    API = "HTTP API and bulk calls"
    EVENTS = "Provider events"


class SampleValue(Protocol):
    """The value of one sample, in a memory-mapped file."""

    def inc(self, amount: float) -> None:
        """Adds to the value."""

    def set(self, value: float) -> None:
        """Replaces the value."""


MakeValue = Callable[["Meter", str, Labels, Labels], SampleValue]
"""Creates the value of a sample from the meter, the sample's name, label names and label values."""


class Meter:
    """A metric that processes count.

    The values of `labels` come from closed vocabularies, never from an email. The counts of the combinations in `known`
    are zero from the start: without a zero, Prometheus would not see the first event as an increase. `panel` is the
    dashboard row.
    """

    kind: ClassVar[str]
    declared: ClassVar[list[Meter]] = []
    """All meters with a panel, in the order of their declaration."""

    def __init__(
        self, name: str, about: str, labels: Labels = (), known: Iterable[Labels] = (), *, panel: Panel | None = None
    ) -> None:
        self.name = name
        self.about = about
        self.labels = labels
        self.known = tuple(known) if labels else ((),)
        self.panel = panel
        self.is_bound = False
        self._make_value: MakeValue | None = None
        self._values: dict[Labels, list[SampleValue]] = {}
        if panel:
            self.declared.append(self)

    @property
    def samples(self) -> dict[str, Labels]:
        """The metric's sample names, each with its label names."""
        return {self.name: self.labels}

    def bind(self, make_value: MakeValue | None) -> None:
        """Makes the meter count from now on, in values that `make_value` creates; None stops counting."""
        self._make_value = make_value
        self.is_bound = make_value is not None
        self._values = {}
        for labels in self.known if self.is_bound else ():
            self._create(labels)

    def _create(self, labels: Labels) -> list[SampleValue]:
        make_value = self._make_value
        assert make_value is not None
        values = [make_value(self, *each) for each in self._numbers(labels)]
        self._values[labels] = values
        return values

    def _numbers(self, labels: Labels) -> Iterator[tuple[str, Labels, Labels]]:
        yield self.name, self.labels, labels


class Counter(Meter):
    """A number that only grows. A process that replaces another process continues its count (see `metric_files`)."""

    kind = "counter"

    def add(self, amount: float, *labels: str) -> None:
        if self.is_bound and amount:
            (self._values.get(labels) or self._create(labels))[0].inc(amount)


class Gauge(Meter):
    """A current amount: the sum of the values that the running processes have set."""

    kind = "gauge"

    def set(self, value: float, *labels: str) -> None:
        """Sets this process's part of the sum."""
        if self.is_bound:
            (self._values.get(labels) or self._create(labels))[0].set(value)


class Histogram(Meter):
    """A distribution of values. A process that replaces another process continues its counts (see `metric_files`)."""

    kind = "histogram"

    def __init__(
        self, name: str, about: str, bounds: Sequence[float], labels: Labels = (), *, panel: Panel | None = None
    ) -> None:
        self.bounds = (*bounds, INFINITE)
        super().__init__(name, about, labels, panel=panel)

    @property
    def samples(self) -> dict[str, Labels]:
        return {f"{self.name}_sum": self.labels, f"{self.name}_bucket": (*self.labels, "le")}

    def observe(self, value: float, *labels: str) -> None:
        if self.is_bound:
            total, *buckets = self._values.get(labels) or self._create(labels)
            total.inc(max(0.0, value))
            buckets[bisect_left(self.bounds, value)].inc(1)

    def observe_all(self, values: Iterable[float], *labels: str) -> None:
        """Counts many values, with one write per bucket instead of one per value."""
        if not self.is_bound or not (values := list(values)):
            return
        total, *buckets = self._values.get(labels) or self._create(labels)
        # If the clock was set back, values may be negative. The sum must not decrease.
        total.inc(max(0.0, sum(values)))
        for bucket, count in Tally(map(partial(bisect_left, self.bounds), values)).items():
            buckets[bucket].inc(count)

    def _numbers(self, labels: Labels) -> Iterator[tuple[str, Labels, Labels]]:
        yield f"{self.name}_sum", self.labels, labels
        for bound in self.bounds:
            text = "+Inf" if bound == INFINITE else repr(float(bound))
            yield f"{self.name}_bucket", (*self.labels, "le"), (*labels, text)
