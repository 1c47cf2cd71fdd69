"""Tests meters that are bound to a dictionary instead of files."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.telemetry.meters import Counter, Gauge, Histogram, Meter


class Numbers(dict[tuple[str, ...], float]):
    """The values by sample and label values."""

    def make(self, _: Meter, sample: str, __: Sequence[str], values: Sequence[str]) -> Number:
        key = (sample, *values)
        self.setdefault(key, 0.0)
        return Number(self, key)


class Number:
    """The value of one sample."""

    def __init__(self, numbers: Numbers, key: tuple[str, ...]) -> None:
        self._numbers = numbers
        self._key = key

    def inc(self, amount: float) -> None:
        self._numbers[self._key] += amount

    def set(self, value: float) -> None:
        self._numbers[self._key] = value


def test_an_unbound_meter_counts_nothing() -> None:
    counter, gauge, histogram = Counter("c_total", ""), Gauge("g", ""), Histogram("h_seconds", "", (1,))

    counter.add(1)
    gauge.set(1)
    histogram.observe(1)
    histogram.observe_all([1])

    assert [each.is_bound for each in (counter, gauge, histogram)] == [False] * 3


def test_known_labels_start_at_zero() -> None:
    numbers = Numbers()

    Counter("c_total", "", ("reason",), (("a",), ("b",))).bind(numbers.make)
    Counter("d_total", "").bind(numbers.make)

    assert numbers == {("c_total", "a"): 0, ("c_total", "b"): 0, ("d_total",): 0}


def test_adding_zero_creates_no_value() -> None:
    numbers, counter = Numbers(), Counter("c_total", "", ("reason",))
    counter.bind(numbers.make)

    counter.add(0, "never")

    assert numbers == {}


def test_binding_again_does_not_change_the_old_values() -> None:
    old, new, counter = Numbers(), Numbers(), Counter("c_total", "")
    counter.bind(old.make)
    counter.add(1)

    counter.bind(new.make)
    counter.add(2)

    assert (old["c_total",], new["c_total",]) == (1, 2)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 99.0])))
def test_observing_many_values_equals_observing_each(values: list[float]) -> None:
    singly, together = Numbers(), Numbers()
    histogram = Histogram("h_seconds", "", (1, 2))

    histogram.bind(singly.make)
    for value in values:
        histogram.observe(value)
    histogram.bind(together.make)
    histogram.observe_all(values)

    assert together == singly
    assert sum(count for (sample, *_), count in singly.items() if sample == "h_seconds_bucket") == len(values)
