"""A deferred email whose attempts are used up waits for a redelivery, if redelivery is on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import answer

GREYLISTED = Deferred(Reason.REFUSED, "Greylisted, try again later", "451 4.7.1")
QUICK: Final[dict[str, Any]] = {"MAX_ATTEMPTS": "2", "RETRY_BASE_SECONDS": "0.01"}


async def test_a_deferral_that_used_up_its_attempts_waits_and_its_message_is_acked(bench: Bench) -> None:
    bench.provider.always = answer(GREYLISTED)
    await bench.start(**QUICK, REDELIVER_FOR="4h")

    (email_id,) = await bench.enqueue()

    await bench.settled({"waiting": 1})
    row = bench.books.row(email_id)
    assert bench.books.outcomes(email_id) == ["deferred", "deferred"]
    assert (row["attempt_count"], row["attempt_base"], row["redelivery_count"]) == (2, 2, 1)
    assert timedelta(seconds=30) < row["wait_until"] - datetime.now(UTC) < timedelta(seconds=75)
    assert row["dead_letter_due_at"] is None
    await bench.nothing_left_on_the_queue()


async def test_a_redelivered_email_has_all_its_attempts_again(bench: Bench) -> None:
    bench.provider.always = answer(GREYLISTED)
    await bench.start(**QUICK, REDELIVER_FOR="4h")
    (email_id,) = await bench.enqueue()
    await bench.settled({"waiting": 1})

    bench.books.change(email_id, status="pending", wait_until=None)
    await bench.deliver([email_id])

    await bench.settled({"waiting": 1})
    row = bench.books.row(email_id)
    assert bench.books.outcomes(email_id) == ["deferred"] * 4
    assert (row["attempt_count"], row["attempt_base"], row["redelivery_count"]) == (4, 4, 2)
    assert row["wait_until"] - datetime.now(UTC) > timedelta(seconds=200)


async def test_a_full_mailbox_gets_one_attempt_per_redelivery(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.RECIPIENT_DEFERRED, "mailbox full", "452 4.2.2"))
    await bench.start(REDELIVER_FOR="4h")
    (email_id,) = await bench.enqueue()
    await bench.settled({"waiting": 1})
    assert bench.books.outcomes(email_id) == ["deferred"]

    bench.books.change(email_id, status="pending", wait_until=None)
    await bench.deliver([email_id])

    await until(lambda: bench.books.outcomes(email_id) == ["deferred"] * 2)
    await bench.settled({"waiting": 1})
    assert bench.books.row(email_id)["redelivery_count"] == 2


@pytest.mark.parametrize(
    ("outcome", "settings", "row"),
    [
        (GREYLISTED, {}, {}),
        (GREYLISTED, {"REDELIVER_FOR": "4h"}, {"redeliver_seconds": 0}),
        (GREYLISTED, {"REDELIVER_FOR": "4h"}, {"due_since": datetime(2026, 1, 1, tzinfo=UTC)}),
        (GREYLISTED, {"REDELIVER_FOR": "4h"}, {"expires_at": timedelta(seconds=45)}),
        (Rejected(Reason.REFUSED, "no"), {"REDELIVER_FOR": "4h"}, {}),
    ],
    ids=["off", "off for its lane", "its time is over", "expires before", "a rejection"],
)
async def test_the_email_fails_as_without_redelivery(
    bench: Bench, outcome: Outcome, settings: dict[str, Any], row: dict[str, object]
) -> None:
    bench.provider.always = answer(outcome)
    await bench.start(**QUICK, **settings)
    (email_id,) = bench.books.enqueue(1)
    if row:
        now = datetime.now(UTC)
        fields = {name: now + each if isinstance(each, timedelta) else each for name, each in row.items()}
        bench.books.change(email_id, **fields)

    await bench.deliver([email_id])

    await bench.settled({"failed": 1})
    assert bench.books.row(email_id)["dead_letter_due_at"] is not None


async def test_the_lane_of_an_email_sets_its_attempts_and_its_redelivery(bench: Bench) -> None:
    bench.provider.always = answer(GREYLISTED)
    await bench.start(MAX_ATTEMPTS="1", RETRY_BASE_SECONDS="0.01")
    (email_id,) = bench.books.enqueue(1)
    bench.books.change(email_id, max_attempts=3, redeliver_seconds=3600)

    await bench.deliver([email_id])

    await bench.settled({"waiting": 1})
    assert bench.books.outcomes(email_id) == ["deferred"] * 3
