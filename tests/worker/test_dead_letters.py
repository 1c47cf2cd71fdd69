"""If an operator moves a dead letter back to the send queue, its email is replayed. Repeated moves have no further
effect."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import pytest

from dispatcher.broker.dead_letter import decode
from dispatcher.domain.outcome import Reason, Rejected
from dispatcher.worker.lease import REQUEUE_SECONDS
from tests.ops.dead_emails import DeadEmails
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import answer


@dataclass
class Hand:
    """An operator who moves messages in RabbitMQ's management UI."""

    bench: Bench
    dead_emails: DeadEmails

    async def put_back(self, email_id: UUID, times: int = 1, **fields: object) -> None:
        """Publishes the email's dead letter on the send queue."""
        body = self.dead_emails.dead_letter(email_id, **fields)
        for _ in range(times):
            await self.bench.rabbit.publish(self.bench.topology.queue, body)


@pytest.fixture
def hand(bench: Bench) -> Hand:
    return Hand(bench, DeadEmails(bench.books, bench.rabbit, bench.topology))


async def relayed(bench: Bench, email_id: UUID) -> None:
    """Waits until the email is due, and publishes its message, as the relay does."""
    await until(lambda: bench.books.row(email_id)["publish_due_at"])
    await bench.deliver([email_id])


async def test_a_dead_letter_moved_back_a_hundred_times_sends_its_email_once(bench: Bench, hand: Hand) -> None:
    (email_id,) = hand.dead_emails.create()
    for _ in range(2):
        await bench.start()

    await hand.put_back(email_id, times=100)
    await until(hand.dead_emails.audit)
    await bench.deliver([email_id])  # as the relay does

    await bench.settled({"sent": 1})
    # If one copy of a dead letter locks the row, the worker requeues the next copy after this time.
    await asyncio.sleep(REQUEUE_SECONDS)
    await bench.nothing_left_on_the_queue()
    assert bench.provider.accepted == {email_id: 1}
    assert [attempt["attempt_number"] for attempt in bench.books.attempts(email_id)] == [4]
    assert [act["action"] for act in hand.dead_emails.audit()] == ["replay_letter"]


async def test_a_dead_letter_of_an_earlier_failure_is_acked(bench: Bench, hand: Hand) -> None:
    (email_id,) = hand.dead_emails.create()
    await bench.start()

    await hand.put_back(email_id, attempts=2)

    await bench.nothing_left_on_the_queue()
    assert bench.books.status(email_id) == "failed"


@pytest.mark.parametrize(
    "columns",
    [{"status": "held"}, {"was_uncertain": True}, {"expires_at": datetime(2026, 1, 1, tzinfo=UTC)}],
    ids=["held", "failed after silence", "expired"],
)
async def test_the_dead_letter_of_an_email_that_may_not_be_sent_again_goes_back_to_the_dlq(
    bench: Bench, hand: Hand, columns: dict[str, object]
) -> None:
    (email_id,) = hand.dead_emails.create(**columns)  # type: ignore[arg-type]
    await bench.start()

    await hand.put_back(email_id)

    (back,) = await bench.rabbit.take_all(bench.topology.dlq, 1)
    await bench.nothing_left_on_the_queue()
    assert decode(back.body).email_id == email_id
    assert not bench.provider.calls


async def test_a_shovel_that_moves_every_dead_letter_back_ends_on_the_dlq(bench: Bench, hand: Hand) -> None:
    (email_id,) = hand.dead_emails.create()
    bench.provider.always = answer(Rejected(Reason.REFUSED, "no"))
    await bench.start()

    for times in range(1, 4):
        await hand.put_back(email_id)
        await relayed(bench, email_id)
        await until(lambda times=times: len(bench.books.attempts(email_id)) == times)  # type: ignore[misc]
        await bench.settled({"failed": 1})
    await hand.put_back(email_id)

    await bench.rabbit.take_all(bench.topology.dlq, 1)
    await bench.nothing_left_on_the_queue()
    assert len(bench.provider.calls) == 3


async def test_a_plain_pointer_to_a_failed_email_replays_nothing(bench: Bench, hand: Hand) -> None:
    (email_id,) = hand.dead_emails.create()
    await bench.start()

    await bench.deliver([email_id])

    await bench.nothing_left_on_the_queue()
    assert bench.books.status(email_id) == "failed"


async def test_a_dead_letter_with_an_impossible_attempt_count_is_ignored_and_delays_nothing(
    bench: Bench, hand: Hand
) -> None:
    (email_id,) = hand.dead_emails.create()
    await bench.start()

    await hand.put_back(email_id, attempts=2**40)
    neighbours = await bench.enqueue(20)

    await bench.settled({"sent": len(neighbours), "failed": 1})
    await bench.nothing_left_on_the_queue()
