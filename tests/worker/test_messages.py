"""Duplicate, foreign, late or invalid messages change no email, because the state of each email is in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest

from dispatcher import enqueue_many
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Deferred, Reason
from tests.store.books import Books, email
from tests.waiting import until
from tests.worker.bench import Bench, new_key
from tests.worker.scripted import accept, accept_when_let_go, answer

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)


async def test_a_hundred_messages_for_one_email_to_two_workers_send_it_once(bench: Bench) -> None:
    for _ in range(2):
        await bench.start(PREFETCH="30")
    (email_id,) = bench.books.enqueue(1)

    await bench.deliver([email_id], times=100)

    await bench.settled({"sent": 1})
    assert bench.provider.accepted == {email_id: 1}
    assert bench.books.row(email_id)["lease_token"] == 1
    await bench.nothing_left_on_the_queue()


async def test_repeated_shuffled_messages_to_two_workers_send_each_email_once(bench: Bench) -> None:
    for _ in range(2):
        await bench.start(PREFETCH="40")
    email_ids = bench.books.enqueue(200)

    for order in (email_ids, email_ids[::-1], email_ids[::2]):
        await bench.deliver(order)

    await bench.settled({"sent": 200})
    await bench.nothing_left_on_the_queue()
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    assert bench.books.hourly() == {"accepted": 200}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b"\xff\xfe",
        b"{}",
        b"null",
        b'{"v": 1, "email_id": "no uuid", "message_key": "key"}',
        b'{"v": 2, "email_id": "018f3a1e-7b5c-7def-8abc-0123456789ab", "message_key": "key"}',
        b'{"v": 1, "email_id": "018f3a1e-7b5c-7def-8abc-0123456789ab", "message_key": "a\\u0000b"}',
        b"[" * 70_000,
    ],
    ids=lambda body: repr(body[:40]),
)
async def test_an_invalid_message_goes_to_the_dlq_unchanged_and_the_others_are_sent(bench: Bench, body: bytes) -> None:
    before, after = bench.books.enqueue(2)
    await bench.deliver([before])
    await bench.rabbit.publish(bench.topology.queue, body)
    await bench.deliver([after])

    await bench.start()

    await bench.settled({"sent": 2})
    (dead,) = await bench.rabbit.take_all(bench.topology.dlq, 1)
    assert dead.body == body
    await bench.nothing_left_on_the_queue()


async def test_a_pointer_to_an_unknown_email_goes_to_the_dlq(bench: Bench) -> None:
    (email_id,) = await bench.enqueue()
    for unknown in (new_email_id(), uuid4()):
        await bench.deliver_pointer(unknown, new_key())

    await bench.start()

    await bench.settled({"sent": 1})
    await bench.rabbit.take_all(bench.topology.dlq, 2)
    assert bench.provider.accepted == {email_id: 1}
    await bench.nothing_left_on_the_queue()


async def test_a_pointer_with_another_emails_key_goes_to_the_dlq_and_the_right_one_is_sent(bench: Bench) -> None:
    first, second = bench.books.enqueue(2)
    await bench.deliver_pointer(first, bench.books.key(second))
    await bench.deliver([first, second])

    await bench.start()

    await bench.settled({"sent": 2})
    await bench.rabbit.take_all(bench.topology.dlq, 1)
    assert bench.provider.accepted == {first: 1, second: 1}
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize("status", ["sent", "failed", "held"])
async def test_a_message_for_a_finished_email_is_acked(bench: Bench, status: str) -> None:
    finished, pending = bench.books.enqueue(2)
    bench.books.change(finished, status=status, locked_until=EXPIRED)
    await bench.start()

    await bench.deliver([finished, pending])

    await until(lambda: bench.provider.accepted == {pending: 1})
    await bench.nothing_left_on_the_queue()
    assert bench.books.status(finished) == status


@pytest.mark.parametrize("locked_until", [EXPIRED, datetime(2100, 1, 1, tzinfo=UTC)], ids=["expired", "live"])
async def test_a_message_for_an_email_leased_by_another_worker_is_acked_even_if_that_lease_has_expired(
    bench: Bench, locked_until: datetime
) -> None:
    leased, pending = bench.books.enqueue(2)
    bench.books.change(leased, status="sending", locked_by="another", lease_token=5, locked_until=locked_until)
    await bench.start()

    await bench.deliver([leased, pending])

    await until(lambda: bench.provider.accepted == {pending: 1})
    await bench.nothing_left_on_the_queue()
    assert (bench.books.status(leased), bench.books.row(leased)["lease_token"]) == ("sending", 5)


async def test_duplicate_messages_are_acked_while_their_email_is_on_the_wire(bench: Bench) -> None:
    bench.provider.always = accept_when_let_go
    worker = await bench.start()
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.provider.waiting)

    await bench.deliver([email_id], times=20)
    await bench.deliver(bench.books.enqueue(1))
    await until(lambda: len(bench.provider.waiting) == 2)
    bench.provider.let_go()

    await bench.settled({"sent": 2})
    assert bench.provider.accepted[email_id] == 1
    await worker.stop()
    await bench.nothing_left_on_the_queue()


async def test_duplicate_messages_do_not_hasten_a_retry(bench: Bench) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=0.5))
    await bench.start(RETRY_CAP_SECONDS="1", MAX_ATTEMPTS="2")
    await bench.deliver([email_id])
    await until(lambda: bench.books.outcomes(email_id) == ["deferred"])

    await bench.deliver([email_id], times=20)

    await bench.settled({"failed": 1})
    first, second = bench.books.attempts(email_id)
    assert (second["started_at"] - first["finished_at"]).total_seconds() >= 0.5
    assert len(bench.provider.calls) == 2
    await bench.nothing_left_on_the_queue()


async def test_a_message_is_not_acked_before_its_result_is_committed(bench: Bench, tables_url: str) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.provider.always = accept_when_let_go
    worker = await bench.start()
    await bench.deliver([email_id])
    await until(lambda: bench.provider.waiting)
    with psycopg.connect(tables_url) as person:
        Books(person).lock(email_id)
        bench.provider.let_go()
        await until(lambda: bench.books.waiting_for_a_lock(worker.name))
        worker.task.cancel()  # like the death of the process
        await asyncio.gather(worker.task, return_exceptions=True)
        (message,) = await bench.rabbit.take_all(bench.topology.queue, 1)

    assert message.redelivered


async def test_a_dead_letter_moved_to_the_send_queue_sends_no_finished_email(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED))
    await bench.start(MAX_ATTEMPTS="1")
    (email_id,) = await bench.enqueue()
    await bench.settled({"failed": 1})

    bench.provider.always = accept
    await bench.deliver([email_id])
    await bench.nothing_left_on_the_queue()

    assert bench.books.statuses() == {"failed": 1}
    assert len(bench.provider.calls) == 1


@pytest.fixture
def refusing(books: Books) -> Iterator[str]:
    """A message key for which PostgreSQL refuses the lease statement, as if a value of the row exceeded its column."""
    books.connection.execute("""
        create function refuse_key() returns trigger language plpgsql as
        $$ begin raise exception using errcode = '22003'; end $$
    """)
    books.connection.execute("""
        create trigger refuse_key before update on email_log
        for each row when (old.message_key = 'unbearable') execute function refuse_key()
    """)
    yield "unbearable"
    books.connection.execute("drop trigger refuse_key on email_log")
    books.connection.execute("drop function refuse_key")


@pytest.mark.parametrize("together", [False, True], ids=["a message each", "one message"])
async def test_a_message_whose_values_postgresql_refuses_goes_to_the_dlq_and_the_others_are_sent(
    bench: Bench, refusing: str, *, together: bool
) -> None:
    enqueue_many(bench.books.connection, [email(refusing)])
    (unbearable,) = [row["email_id"] for row in bench.books.rows()]
    neighbours = bench.books.enqueue(30)

    deliver = bench.deliver_together if together else bench.deliver
    await deliver([*neighbours[:15], unbearable, *neighbours[15:]])
    await bench.start()

    await bench.settled({"sent": 30, "pending": 1})
    (dead,) = await bench.rabbit.take_all(bench.topology.dlq, 1)
    assert str(unbearable).encode() in dead.body
    await bench.nothing_left_on_the_queue()
