"""No attempt begins after an email has expired. A deferred email whose attempts are used up waits for a redelivery, if
redelivery is on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason
from dispatcher.host.clock import steady_clock
from dispatcher.providers.contract import Attempt, BulkCallRefused, BulkEntry
from dispatcher.worker.bulk_calls import with_bulk_calls
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedBulk, ScriptedProvider, answer, leave_when_let_go

PAST = datetime(2026, 1, 1, tzinfo=UTC)
SECONDS = 1.5
"""Until the emails expire. A busy machine leases them before."""
GREYLISTED = Deferred(Reason.REFUSED, "Greylisted, try again later", "451 4.7.1")
FULL = Deferred(Reason.RECIPIENT_DEFERRED, "mailbox full", "452 4.2.2")
QUICK: Final[dict[str, Any]] = {"MAX_ATTEMPTS": "2", "RETRY_BASE_SECONDS": "0.01"}
HOURS: Final[dict[str, Any]] = {"REDELIVER_FOR": "4h"}


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


class BulkWhenLetGo(ScriptedBulk):
    """Waits before the first byte, as for a connection."""

    async def send_bulk(self, parts: Sequence[BulkEntry], attempt: Attempt) -> Sequence[Outcome] | BulkCallRefused:
        self.waiting |= {part.content.email_id for part in parts}
        await self._let_go.wait()
        return await super().send_bulk(parts, attempt)


@pytest.mark.parametrize("is_bulk", [False, True], ids=["alone", "in a bulk call"])
async def test_an_email_that_expires_under_its_lease_is_refused_at_its_first_byte(bench: Bench, is_bulk: bool) -> None:
    provider = BulkWhenLetGo() if is_bulk else ScriptedProvider()
    provider.always = leave_when_let_go
    await bench.start([with_bulk_calls(provider, 10)])
    (expired,) = bench.books.enqueue(1, expires_at=soon(SECONDS))
    expired_at = steady_clock() + SECONDS
    (alive,) = bench.books.enqueue(1)
    await bench.deliver([expired, alive])
    await until(lambda: provider.waiting == {expired, alive})
    await until(lambda: steady_clock() > expired_at)

    provider.let_go()

    await bench.settled({"pending": 1, "sent": 1})
    row = bench.books.row(expired)
    assert (row["attempt_count"], row["publish_due_at"] is None) == (0, False)
    assert provider.accepted == {alive: 1}
    await bench.nothing_left_on_the_queue()


async def test_an_expired_email_is_not_leased_and_none_waits_under_a_lease_for_a_later_retry(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=50.0))
    expired, waits = bench.books.enqueue(1, expires_at=soon(60)) + bench.books.enqueue(1, expires_at=soon(40))
    bench.books.change(expired, expires_at=PAST)
    await bench.start(RETRY_CAP_SECONDS="60")

    await bench.deliver([expired, waits])

    await until(lambda: bench.books.outcomes(waits) == ["deferred"])
    await bench.settled({"pending": 2})
    await bench.nothing_left_on_the_queue()
    assert (bench.books.row(expired)["lease_token"], bench.provider.calls) == (0, [waits])
    row = bench.books.row(waits)
    assert row["attempt_count"] == 1
    assert row["publish_due_at"] > row["expires_at"], "the provider asked for a longer wait"


@pytest.mark.parametrize(("outcome", "attempts"), [(GREYLISTED, 2), (FULL, 1)], ids=["greylisted", "mailbox full"])
async def test_a_deferral_that_used_up_its_attempts_waits_and_has_all_its_attempts_again_when_redelivered(
    bench: Bench, outcome: Deferred, attempts: int
) -> None:
    bench.provider.always = answer(outcome)
    await bench.start(**QUICK, **HOURS)
    (email_id,) = await bench.enqueue()

    for number, least_seconds in ((1, 30), (2, 200)):
        await bench.settled({"waiting": 1})
        row = bench.books.row(email_id)
        assert bench.books.outcomes(email_id) == ["deferred"] * attempts * number
        counts = (row["attempt_count"], row["attempt_base"], row["redelivery_count"])
        assert counts == (attempts * number, attempts * number, number)
        assert row["wait_until"] - datetime.now(UTC) > timedelta(seconds=least_seconds)
        assert number == 2 or row["wait_until"] - datetime.now(UTC) < timedelta(seconds=75)
        assert row["dead_letter_due_at"] is None
        if number == 1:
            bench.books.change(email_id, status="pending", wait_until=None)
            await bench.deliver([email_id])
            await until(lambda: len(bench.books.outcomes(email_id)) == 2 * attempts)
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize(
    "row",
    [{"redeliver_seconds": 0}, {"due_since": PAST}, {"expires_at": timedelta(seconds=45)}],
    ids=["off for its lane", "its time is over", "expires before"],
)
async def test_the_email_fails_as_without_redelivery(bench: Bench, row: dict[str, object]) -> None:
    bench.provider.always = answer(GREYLISTED)
    await bench.start(**QUICK, **HOURS)
    (email_id,) = bench.books.enqueue(1)
    for name, value in row.items():
        bench.books.change(email_id, **{name: datetime.now(UTC) + value if isinstance(value, timedelta) else value})

    await bench.deliver([email_id])

    await bench.settled({"failed": 1})
    assert bench.books.row(email_id)["dead_letter_due_at"] is not None
