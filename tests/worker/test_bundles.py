"""A worker handles each email of a bundle separately, and acks the message after the last email."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from uuid import UUID

import orjson
import psycopg
import pytest

from dispatcher.config import MAX_BUNDLE_EMAILS
from dispatcher.domain.outcome import Deferred, Reason, Rejected
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Taken
from tests.store.books import Books
from tests.waiting import until
from tests.worker.bench import Bench, Worker
from tests.worker.scripted import accept, accept_when_let_go, answer, leave_when_let_go

ONE_AT_A_TIME = "1"
"""A value for PREFETCH with which RabbitMQ delivers a message only after the previous message is acked."""


def emails_in(message: Taken) -> list[UUID]:
    return [UUID(each["email_id"]) for each in orjson.loads(message.body)["emails"]]


async def end(worker: Worker) -> None:
    """Stops the worker as if its process had died; its connection to RabbitMQ closes."""
    worker.task.cancel()
    await asyncio.gather(worker.task, return_exceptions=True)


def withhold(bench: Bench, email_ids: Iterable[UUID]) -> None:
    """Delays the provider's answers for these emails until `let_go`."""
    for email_id in email_ids:
        bench.provider.script[email_id].append(accept_when_let_go)


@pytest.mark.parametrize("prefetch", ["1", "7", "256"])
async def test_every_email_of_a_message_is_sent_once_and_then_the_message_is_acked(bench: Bench, prefetch: str) -> None:
    email_ids = bench.books.enqueue(2 * MAX_BUNDLE_EMAILS)
    await bench.start(PREFETCH=prefetch)

    for half in (email_ids[:MAX_BUNDLE_EMAILS], email_ids[MAX_BUNDLE_EMAILS:]):
        await bench.deliver_together(half)

    await bench.settled({"sent": 2 * MAX_BUNDLE_EMAILS})
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    assert bench.books.hourly() == {"accepted": 2 * MAX_BUNDLE_EMAILS}
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize("last", [0, 3, 7])
async def test_a_message_is_not_acked_while_one_of_its_emails_is_on_the_wire(bench: Bench, last: int) -> None:
    before, together, after = bench.books.enqueue(20), bench.books.enqueue(8), bench.books.enqueue(20)
    withhold(bench, [together[last]])
    worker = await bench.start(PREFETCH="4")

    await bench.deliver(before)
    await bench.deliver_together(together)
    await bench.deliver(after)
    await bench.settled({"sent": 47, "sending": 1})
    await bench.all_are_delivered()
    await end(worker)

    (message,) = await bench.rabbit.take_all(bench.topology.queue, 1)
    assert message.redelivered
    assert emails_in(message) == together


async def test_single_email_messages_fill_the_window(bench: Bench) -> None:
    email_ids = bench.books.enqueue(20)
    withhold(bench, email_ids)
    await bench.deliver(email_ids)

    await bench.start(PREFETCH="8")

    await until(lambda: len(bench.provider.waiting) == 8)


async def test_a_message_redelivered_after_a_lost_channel_sends_nothing_twice(bench: Bench, broker: Proxy) -> None:
    email_ids = bench.books.enqueue(8)
    withhold(bench, email_ids[::4])
    await bench.start(AMQP_URL=broker.url)
    await bench.deliver_together(email_ids)
    await bench.settled({"sent": 6, "sending": 2})
    connections = broker.connections

    broker.cut()
    await until(lambda: broker.connections > connections)
    neighbour = bench.books.enqueue_one()
    await bench.deliver([neighbour])
    await until(lambda: bench.provider.accepted[neighbour] == 1)
    bench.provider.let_go()

    await bench.settled({"sent": 9})
    assert bench.provider.accepted == dict.fromkeys([*email_ids, neighbour], 1)
    await bench.nothing_left_on_the_queue()


async def test_emails_of_a_message_that_a_dead_worker_had_not_leased_are_sent_by_the_next_worker(bench: Bench) -> None:
    email_ids = bench.books.enqueue(8)
    withhold(bench, email_ids[2:4])
    first = await bench.start(PREFETCH="2")
    await bench.deliver_together(email_ids)
    await until(lambda: len(bench.provider.waiting) == 2)
    await end(first)

    await bench.start()

    # The dead worker had leased these two emails. Recovery would settle them from the worker's ledger or after their
    # leases expire.
    await bench.settled({"sent": 6, "sending": 2})
    assert all(bench.provider.accepted[each] == 1 for each in email_ids[:2] + email_ids[4:])
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize("unknown_at", [0, 2, 4])
async def test_a_message_with_one_unknown_email_goes_to_the_dlq_once_the_others_are_sent(
    bench: Bench, unknown_at: int
) -> None:
    email_ids = bench.books.enqueue(4)
    withhold(bench, email_ids[3:])
    await bench.start()

    await bench.deliver_together(email_ids, unknown_at=unknown_at)
    await bench.settled({"sent": 3, "sending": 1})
    assert await bench.rabbit.take(bench.topology.dlq) is None
    bench.provider.let_go()

    await bench.settled({"sent": 4})
    (dead,) = await bench.rabbit.take_all(bench.topology.dlq, 1)
    assert set(email_ids) < set(emails_in(dead))
    assert len(emails_in(dead)) == 5
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    await bench.nothing_left_on_the_queue()


async def test_a_pointer_with_a_wrong_key_is_not_sent_and_the_others_of_its_message_are(bench: Bench) -> None:
    first, second, third = bench.books.enqueue(3)
    named = {str(first): bench.books.key(second), str(third): bench.books.key(third)}
    emails = [{"email_id": email_id, "message_key": key} for email_id, key in named.items()]
    await bench.start()

    await bench.rabbit.publish(bench.topology.queue, orjson.dumps({"v": 2, "emails": emails}))

    await bench.settled({"sent": 1, "pending": 2})
    (dead,) = await bench.rabbit.take_all(bench.topology.dlq, 1)
    assert emails_in(dead) == [first, third]
    assert bench.provider.accepted == {third: 1}
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize("emails", [[], [[]], [{}], "all", None, [{"v": 2, "emails": []}], "too many"], ids=repr)
async def test_a_message_with_an_invalid_pointer_list_goes_to_the_dlq_unchanged(bench: Bench, emails: object) -> None:
    email_id = bench.books.enqueue_one()
    if emails == "too many":
        pointer = {"email_id": str(email_id), "message_key": bench.books.key(email_id)}
        emails = [pointer] * (MAX_BUNDLE_EMAILS + 1)
    body = orjson.dumps({"v": 2, "emails": emails})
    await bench.start()

    await bench.rabbit.publish(bench.topology.queue, body)
    await bench.rabbit.publish(bench.topology.queue, body)

    assert [dead.body for dead in await bench.rabbit.take_all(bench.topology.dlq, 2)] == [body, body]
    assert bench.provider.calls == []
    await bench.nothing_left_on_the_queue()


async def test_a_message_of_finished_and_repeated_emails_sends_each_once_and_is_acked(bench: Bench) -> None:
    sent, held, new, other = bench.books.enqueue(4)
    bench.books.change(sent, status="sent")
    bench.books.change(held, status="held")
    await bench.start()

    await bench.deliver_together([new, sent, new, held, other, new])
    await bench.deliver_together([other, other])

    await bench.settled({"sent": 3, "held": 1})
    assert bench.provider.accepted == {new: 1, other: 1}
    await bench.nothing_left_on_the_queue()


async def test_two_workers_with_overlapping_messages_of_different_sizes_send_each_email_once(bench: Bench) -> None:
    email_ids = bench.books.enqueue(150)
    for _ in range(2):
        await bench.start(PREFETCH="20")

    for size in (50, 3, 16):
        order = email_ids[:: -1 if size == 3 else 1]
        for at in range(0, len(order), size):
            await bench.deliver_together(order[at : at + size])

    await bench.settled({"sent": 150})
    await bench.nothing_left_on_the_queue()
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    assert bench.books.hourly() == {"accepted": 150}


async def test_a_drain_in_the_middle_of_a_message_releases_unsent_emails_and_loses_none(bench: Bench) -> None:
    email_ids = bench.books.enqueue(12)
    on_the_wire, not_left = email_ids[2:4], email_ids[4:6]
    withhold(bench, on_the_wire)
    for email_id in not_left:
        bench.provider.script[email_id].append(leave_when_let_go)
    worker = await bench.start(PREFETCH="4")
    await bench.deliver_together(email_ids)
    await until(lambda: bench.provider.waiting == {*on_the_wire, *not_left})

    worker.begin_to_stop()
    await until(lambda: bench.provider.waiting == {*on_the_wire})
    bench.provider.let_go()
    await asyncio.wait_for(worker.task, 20)

    assert bench.books.statuses() == {"sent": 4, "pending": 8}
    assert all(bench.books.row(each)["publish_due_at"] is not None for each in not_left)
    await bench.start()  # the message is still on the queue
    await bench.settled({"sent": 12})
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    await bench.nothing_left_on_the_queue()


async def test_a_message_is_acked_while_one_of_its_emails_waits_for_a_retry(bench: Bench) -> None:
    deferred, rejected, other = together = bench.books.enqueue(3)
    bench.provider.script[deferred].append(answer(Deferred(Reason.REFUSED, retry_after=50.0)))
    bench.provider.script[rejected].append(answer(Rejected(Reason.REFUSED)))
    await bench.start(PREFETCH=ONE_AT_A_TIME, RETRY_CAP_SECONDS="60")

    await bench.deliver_together(together)
    next_one = (await bench.enqueue())[0]

    await until(lambda: bench.provider.accepted == {other: 1, next_one: 1})
    await bench.settled({"sending": 1, "failed": 1, "sent": 2})
    await bench.nothing_left_on_the_queue()


async def test_a_retried_email_and_the_others_of_its_message_are_sent_once(bench: Bench) -> None:
    email_ids = bench.books.enqueue(6)
    for email_id in email_ids[::2]:
        bench.provider.script[email_id].extend([answer(Deferred(Reason.REFUSED)), accept])
    await bench.start(PREFETCH="2")

    await bench.deliver_together(email_ids)

    await bench.settled({"sent": 6})
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    assert [len(bench.books.outcomes(email_id)) for email_id in email_ids] == [2, 1] * 3
    await bench.nothing_left_on_the_queue()


async def test_a_message_with_a_locked_email_is_requeued_until_the_lock_is_released(
    bench: Bench, tables_url: str
) -> None:
    email_ids = bench.books.enqueue(5)
    await bench.start(lock_seconds=0.2)
    with psycopg.connect(tables_url) as person:
        Books(person).lock(email_ids[1])
        await bench.deliver_together(email_ids)
        await bench.settled({"sent": 4, "pending": 1})

    # No relay runs in this test, so no other message points to the email.
    await bench.settled({"sent": 5})
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    await bench.nothing_left_on_the_queue()
