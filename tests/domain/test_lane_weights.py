"""The lanes' shares of workers and rates."""

from __future__ import annotations

from dispatcher.domain.controls import LanePolicy
from dispatcher.domain.turns import LaneWeights


def test_lanes_before_normal_weigh_more_and_lanes_after_it_less() -> None:
    weights = LaneWeights(["otp", "normal", "news", "archive"])

    assert {lane: weights.of(lane) for lane in ("otp", "normal", "news", "archive")} == {
        "otp": 50,
        "normal": 40,
        "news": 10,
        "archive": 10,
    }
    assert weights.urgent == "otp"


def test_without_a_lane_before_normal_no_lane_is_urgent() -> None:
    assert LaneWeights(["normal", "bulk"]).urgent is None


def test_an_operators_weight_replaces_the_default_but_the_urgent_lane_keeps_a_fifth() -> None:
    weights = LaneWeights()

    weights.update({"bulk": LanePolicy("bulk", 360.0), "urgent": LanePolicy("urgent", 1.0)})

    assert weights.of("bulk") == 360
    assert weights.of("urgent") == (360 + 40) / 4
    weights.update({})
    assert (weights.of("urgent"), weights.of("bulk")) == (50, 10)
