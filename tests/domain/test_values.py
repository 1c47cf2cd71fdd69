"""Our dataclasses behave as those of the standard library, except that mypy, and not Python, keeps them frozen."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from dispatcher import Attachment
from dispatcher.domain.values import dataclass, field, replace, value


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0
    note: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)


@dataclass(slots=True)
class Tally:
    count: int = 0


@dataclass(slots=True, eq=False)
class Node:
    name: str


@value
class Nothing:
    pass


def test_frozen_values_are_compared_and_hashed_by_their_compared_fields() -> None:
    one = Point(1, 2, "a", "s")

    assert one == Point(1, 2, "b", "s")
    assert hash(one) == hash(Point(1, 2, "b", "s"))
    others: tuple[object, ...] = (Point(1, 3, "a", "s"), (1, 2, "s"), Tally(1))
    assert one not in others
    assert repr(one) == "Point(x=1, y=2, note='a')"
    assert replace(one, y=5).y == 5
    assert dataclasses.asdict(Point(1)) == {"x": 1, "y": 0, "note": "", "secret": ""}
    assert copy.deepcopy(one) == one


def test_other_values_have_no_hash_and_may_have_no_equality() -> None:
    assert Tally(1) == Tally(1)
    with pytest.raises(TypeError):
        hash(Tally(1))
    assert len({Node("a"), Node("a")}) == 2
    assert len({Nothing(), Nothing()}) == 1


def test_an_attachment_is_frozen_so_that_applications_can_derive_from_it_and_change_no_checked_value() -> None:
    @dataclasses.dataclass(frozen=True)
    class Pdf(Attachment):
        pages: int = 1

    with pytest.raises(dataclasses.FrozenInstanceError):
        Pdf("invoice.pdf", "application/pdf", b"").filename = "../invoice.pdf"  # type: ignore[misc]
