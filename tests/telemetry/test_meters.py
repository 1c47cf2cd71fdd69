"""What a meter does, without files: cells are numbers in a dictionary."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.telemetry.meters import Counter, Gauge, Histogram, Meter


class Numbers(dict[tuple[str, ...], float]):
    """Cells, by sample and label values."""

    def make(self, _: Meter, sample: str, __: Sequence[str], values: Sequence[str]) -> Number:
        key = (sample, *values)
        self.setdefault(key, 0.0)
        return Number(self, key)


class Number:
    """One cell."""

    def __init__(self, numbers: Numbers, key: tuple[str, ...]) -> None:
        self._numbers = numbers
        self._key = key

    def inc(self, amount: float) -> None:
        self._numbers[self._key] += amount

    def set(self, value: float) -> None:
        self._numbers[self._key] = value


def test_a_meter_that_is_not_bound_counts_nowhere() -> None:
    counter, gauge, histogram = Counter("c_total", ""), Gauge("g", ""), Histogram("h_seconds", "", (1,))

    counter.add(1)
    gauge.set(1)
    histogram.observe(1)
    histogram.observe_all([1])

    assert [each.is_bound for each in (counter, gauge, histogram)] == [False] * 3


def test_what_is_known_exists_at_zero_before_the_first_event() -> None:
    numbers = Numbers()

    Counter("c_total", "", ("reason",), (("a",), ("b",))).bind(numbers.make)
    Counter("d_total", "").bind(numbers.make)

    assert numbers == {("c_total", "a"): 0, ("c_total", "b"): 0, ("d_total",): 0}


def test_nothing_added_makes_no_cell() -> None:
    numbers, counter = Numbers(), Counter("c_total", "", ("reason",))
    counter.bind(numbers.make)

    counter.add(0, "never")

    assert numbers == {}


def test_binding_again_leaves_the_old_cells_alone() -> None:
    old, new, counter = Numbers(), Numbers(), Counter("c_total", "")
    counter.bind(old.make)
    counter.add(1)

    counter.bind(new.make)
    counter.add(2)

    assert (old["c_total",], new["c_total",]) == (1, 2)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 99.0])))
def test_many_values_at_once_count_as_one_by_one(values: list[float]) -> None:
    singly, together = Numbers(), Numbers()
    histogram = Histogram("h_seconds", "", (1, 2))

    histogram.bind(singly.make)
    for value in values:
        histogram.observe(value)
    histogram.bind(together.make)
    histogram.observe_all(values)

    assert together == singly
    assert sum(count for (sample, *_), count in singly.items() if sample == "h_seconds_bucket") == len(values)
