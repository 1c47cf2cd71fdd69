"""No attempt begins after an email has expired."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason
from dispatcher.host.clock import steady_clock
from dispatcher.providers.contract import Attempt, BulkCallRefused, BulkEntry, Provider
from dispatcher.worker.bulk_calls import with_bulk_calls
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedBulk, ScriptedProvider, answer, leave_when_let_go

PAST = datetime(2026, 1, 1, tzinfo=UTC)
SECONDS = 1.5
"""Until the emails expire. A busy machine leases them before."""


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


class BulkWhenLetGo(ScriptedBulk):
    """Waits before the first byte, as for a connection."""

    async def send_bulk(self, parts: Sequence[BulkEntry], attempt: Attempt) -> Sequence[Outcome] | BulkCallRefused:
        self.waiting |= {part.content.email_id for part in parts}
        await self._let_go.wait()
        return await super().send_bulk(parts, attempt)


def alone() -> tuple[ScriptedProvider, Provider]:
    provider = ScriptedProvider()
    provider.always = leave_when_let_go
    return provider, provider


def in_a_bulk_call() -> tuple[ScriptedProvider, Provider]:
    provider = BulkWhenLetGo()
    return provider, with_bulk_calls(provider, 10)


@pytest.mark.parametrize("providers", [alone, in_a_bulk_call])
async def test_an_email_that_expires_under_its_lease_is_refused_in_the_turn_of_the_first_byte(
    bench: Bench, providers: type
) -> None:
    provider, used = providers()
    await bench.start([used])
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


async def test_the_message_of_an_expired_email_is_acked_without_a_lease(bench: Bench) -> None:
    (email_id,) = bench.books.enqueue(1, expires_at=soon(60))
    bench.books.change(email_id, expires_at=PAST)
    await bench.start()

    await bench.deliver([email_id])

    await bench.nothing_left_on_the_queue()
    row = bench.books.row(email_id)
    assert (row["status"], row["lease_token"], bench.provider.calls) == ("pending", 0, [])


async def test_a_retry_that_would_begin_after_the_expiry_does_not_keep_the_email_leased(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=50.0))
    await bench.start(RETRY_CAP_SECONDS="60")
    (email_id,) = await bench.enqueue(expires_at=soon(40))

    await until(lambda: bench.books.outcomes(email_id) == ["deferred"])
    await bench.settled({"pending": 1})

    row = bench.books.row(email_id)
    assert (row["attempt_count"], len(bench.provider.calls)) == (1, 1)
    assert row["publish_due_at"] > row["expires_at"], "the provider asked for a longer wait"
    await bench.nothing_left_on_the_queue()
