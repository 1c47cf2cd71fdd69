"""Weighted turns among lanes or tenants."""

from __future__ import annotations

from collections import Counter

from dispatcher.domain.controls import LanePolicy
from dispatcher.domain.turns import MAX_ABSENT, LaneWeights, Turns


def serve(turns: Turns, waiting: list[str], times: int) -> Counter[str]:
    served: Counter[str] = Counter()
    for _ in range(times):
        name = turns.next(waiting)
        turns.charge(name)
        served[name] += 1
    return served


def test_names_that_always_wait_are_served_by_weight() -> None:
    weights = {"urgent": 5.0, "normal": 3.0, "bulk": 2.0}
    assert serve(Turns(weights.__getitem__), list(weights), 1000) == {"urgent": 500, "normal": 300, "bulk": 200}


def test_a_name_that_needs_less_than_its_share_is_next_whenever_it_waits() -> None:
    turns = Turns(lambda _: 1.0)
    serve(turns, ["bulk"], 1000)
    for _ in range(20):
        assert turns.next(["bulk", "urgent"]) == "urgent"
        turns.charge("urgent")
        serve(turns, ["bulk"], 3)


def test_a_name_gets_no_credit_for_the_time_when_it_did_not_wait() -> None:
    turns = Turns(lambda _: 1.0)
    serve(turns, ["a"], 1000)
    assert serve(turns, ["a", "b"], 100) == {"a": 50, "b": 50}


def test_a_name_that_leaves_and_returns_after_each_email_gets_no_more_than_its_share() -> None:
    turns = Turns(lambda _: 1.0)
    served: Counter[str] = Counter()
    for number in range(100):
        served += serve(turns, ["bulk", "flicker"] if number % 2 else ["bulk"], 1)
    assert served["flicker"] <= 50


def test_the_clocks_of_many_names_that_no_longer_wait_are_dropped() -> None:
    turns = Turns(lambda _: 1.0)
    for number in range(10_000):
        turns.charge(turns.next([f"tenant {number}"]))
    assert len(turns._clocks) <= MAX_ABSENT + 1


def test_lanes_before_normal_weigh_more_and_lanes_after_it_less() -> None:
    weights = LaneWeights(["otp", "normal", "news", "archive"])

    assert [weights.of(lane) for lane in ("otp", "normal", "news", "archive")] == [50, 40, 10, 10]
    assert (weights.urgent, LaneWeights(["normal", "bulk"]).urgent) == ("otp", None)


def test_an_operators_weight_replaces_the_default_but_the_urgent_lane_keeps_a_fifth() -> None:
    weights = LaneWeights()

    weights.update({"bulk": LanePolicy("bulk", 360.0), "urgent": LanePolicy("urgent", 1.0)})

    assert weights.of("bulk") == 360
    assert weights.of("urgent") == (360 + 40) / 4
    weights.update({})
    assert (weights.of("urgent"), weights.of("bulk")) == (50, 10)
