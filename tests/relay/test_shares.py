"""How many emails of each lane and tenant are in the next batch. Needs no servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from dispatcher.relay.shares import Shares
from tests.relay.test_pointers import Queue

MOST = 500


@pytest.mark.parametrize(
    ("waiting", "turns"),
    [
        ({"urgent": 1, "normal": 400}, {"urgent": 1, "normal": 400}),
        ({"urgent": 400, "normal": 1, "bulk": 90}, {"urgent": 400, "normal": 1, "bulk": 90}),
        ({"urgent": 400, "normal": 400}, {"urgent": 250, "normal": 250}),
        ({"urgent": 100, "normal": 900, "bulk": 900}, {"urgent": 100, "normal": 200, "bulk": 200}),
        ({"urgent": 900, "normal": 900, "bulk": 900}, {"urgent": 166, "normal": 167, "bulk": 167}),
    ],
)
def test_a_batch_leaves_no_email_out_while_it_has_room_and_lanes_with_many_emails_get_equal_parts(
    waiting: Mapping[str, int], turns: Mapping[str, int]
) -> None:
    shares = Shares({lane: Queue() for lane in ("urgent", "normal", "bulk")})

    order = shares.allot({(lane, "acme"): emails for lane, emails in waiting.items()}, MOST)

    assert Counter(lane for lane, _ in order) == turns
    assert [lane for lane, _ in order] == sorted((lane for lane, _ in order), key=list(waiting).index)
