"""Duplicate, foreign, late or invalid messages change no email, because the state of each email is in PostgreSQL. A
message may point to several emails: a bundle. Its emails are handled separately, and it is acked after the last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID, uuid4

import orjson
import pytest
from structlog.testing import capture_logs

from dispatcher import enqueue_many
from dispatcher.config import MAX_BUNDLE_EMAILS
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Deferred, Reason
from tests.broker.rabbit import Taken
from tests.ops.dead_emails import DeadEmails
from tests.store.books import Books, email
from tests.waiting import until
from tests.worker.bench import Bench, Worker, new_key
from tests.worker.scripted import accept_when_let_go, answer, leave_when_let_go

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)
FAR = datetime(2100, 1, 1, tzinfo=UTC)


def emails_in(message: Taken) -> list[UUID]:
    return [UUID(each["email_id"]) for each in orjson.loads(message.body)["emails"]]


def withhold(bench: Bench, email_ids: Iterable[UUID]) -> None:
    for email_id in email_ids:
        bench.provider.script[email_id].append(accept_when_let_go)


async def end(worker: Worker) -> None:
    """Stops the worker as if its process had died; its connection to RabbitMQ closes."""
    worker.task.cancel()
    await asyncio.gather(worker.task, return_exceptions=True)


async def test_two_workers_with_repeated_shuffled_and_overlapping_messages_send_each_email_once(bench: Bench) -> None:
    for _ in range(2):
        await bench.start(PREFETCH="20")
    email_ids = bench.books.enqueue(150)
    bench.provider.script[email_ids[1]].append(answer(Deferred(Reason.REFUSED)))

    await bench.deliver(email_ids[:1], times=100)
    for order in (email_ids, email_ids[::-1], email_ids[::2]):
        await bench.deliver(order)
    for size in (50, 3, 16):
        order = email_ids[:: -1 if size == 3 else 1]
        for at in range(0, len(order), size):
            await bench.deliver_together(order[at : at + size])

    await bench.each_is_sent_once(email_ids)
    assert {row["lease_token"] for row in bench.books.rows()} == {1}
    assert bench.books.hourly() == {"accepted": 150, "deferred": 1}


SOME_ID: Final = "018f3a1e-7b5c-7def-8abc-0123456789ab"
LISTS: Final[tuple[object, ...]] = ([], [[]], [{}], "all", None, [{"v": 2, "emails": []}])
TOO_MANY: Final = [{"email_id": SOME_ID, "message_key": "key"}] * (MAX_BUNDLE_EMAILS + 1)
INVALID: Final = [
    b"",
    b"garbage",
    b"\xff\xfe",
    b"{}",
    b"null",
    b'{"v": 1, "email_id": "no uuid", "message_key": "key"}',
    f'{{"v": 2, "email_id": "{SOME_ID}", "message_key": "key"}}'.encode(),
    f'{{"v": 1, "email_id": "{SOME_ID}", "message_key": "a\\u0000b"}}'.encode(),
    b"[" * 70_000,
    *(orjson.dumps({"v": 2, "emails": emails}) for emails in (*LISTS, TOO_MANY)),
]


async def test_invalid_messages_go_to_the_dlq_unchanged_and_the_others_are_sent(bench: Bench) -> None:
    before, after = bench.books.enqueue(2)
    await bench.deliver([before])
    for body in INVALID:
        await bench.rabbit.publish(bench.topology.queue, body)
    await bench.deliver([after])

    await bench.start()

    await bench.settled({"sent": 2})
    dead = await bench.rabbit.take_all(bench.topology.dlq, len(INVALID))
    assert sorted(each.body for each in dead) == sorted(INVALID)
    await bench.nothing_left_on_the_queue()


async def test_a_pointer_to_an_unknown_email_or_with_another_emails_key_goes_to_the_dlq(bench: Bench) -> None:
    first, second, third, fourth = bench.books.enqueue(4)
    for unknown in (new_email_id(), uuid4()):
        await bench.deliver_pointer(unknown, new_key())
    await bench.deliver_pointer(first, bench.books.key(second))
    named = {third: bench.books.key(second), fourth: bench.books.key(fourth)}
    emails = [{"email_id": str(email_id), "message_key": key} for email_id, key in named.items()]
    await bench.rabbit.publish(bench.topology.queue, orjson.dumps({"v": 2, "emails": emails}))

    await bench.start()

    await bench.settled({"sent": 1, "pending": 3})
    dead = await bench.rabbit.take_all(bench.topology.dlq, 4)
    assert [emails_in(each) for each in dead if b"emails" in each.body] == [[third, fourth]]
    await bench.deliver([first, second])
    await bench.settled({"sent": 3, "pending": 1})
    assert bench.provider.accepted == {first: 1, second: 1, fourth: 1}
    await bench.nothing_left_on_the_queue()


OURS_NO_MORE: Final[dict[str, dict[str, object]]] = {
    "sent": {"status": "sent", "locked_until": EXPIRED},
    "failed": {"status": "failed", "locked_until": EXPIRED},
    "held": {"status": "held", "locked_until": EXPIRED},
    "expired lease": {"status": "sending", "locked_by": "another", "lease_token": 5, "locked_until": EXPIRED},
    "live lease": {"status": "sending", "locked_by": "another", "lease_token": 5, "locked_until": FAR},
}


async def test_messages_for_finished_emails_and_emails_of_another_worker_are_acked(bench: Bench) -> None:
    others = bench.books.enqueue(len(OURS_NO_MORE))
    for email_id, columns in zip(others, OURS_NO_MORE.values(), strict=True):
        bench.books.change(email_id, **columns)
    rows = bench.books.rows()
    alone, new, other = bench.books.enqueue(3)
    await bench.start()

    await bench.deliver([*others, alone])
    await bench.deliver_together([new, others[0], new, others[2], other, new])
    await bench.deliver_together([other, other])

    await until(lambda: bench.provider.accepted == {alone: 1, new: 1, other: 1})
    await bench.nothing_left_on_the_queue()
    assert bench.books.rows()[: len(others)] == rows


async def test_a_dead_letter_moved_to_the_send_queue_goes_back_and_the_log_names_the_command(bench: Bench) -> None:
    dead_emails = DeadEmails(bench.books, bench.rabbit, bench.topology)
    letters: dict[UUID, bytes] = {}
    columns: tuple[dict[str, Any], ...] = ({}, {"status": "held"}, {"expires_at": EXPIRED}, {})
    for each, fields in zip(columns, ({}, {}, {}, {"attempts": 2}), strict=True):
        (email_id,) = dead_emails.create(**each)
        letters[email_id] = dead_emails.dead_letter(email_id, **fields)
    rows = bench.books.rows()
    await bench.start()

    with capture_logs() as logs:
        for letter in letters.values():
            await bench.rabbit.publish(bench.topology.queue, letter)
        back = await bench.rabbit.take_all(bench.topology.dlq, len(letters))
    # The worker acks a plain pointer to a failed email, and an impossible dead letter.
    await bench.deliver(letters)
    await bench.rabbit.publish(bench.topology.queue, dead_emails.dead_letter(next(iter(letters)), attempts=2**40))

    await bench.nothing_left_on_the_queue()
    assert sorted(each.body for each in back) == sorted(letters.values())
    assert (bench.books.rows(), bench.provider.calls) == (rows, [])
    remedies = "".join(each["remedy"] for each in logs if each["event"] == "message.returned")
    assert all(f"dispatcher dlq replay {each}" in remedies for each in letters)


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


@pytest.mark.parametrize("last", [0, 7])
async def test_a_bundle_is_not_acked_while_one_of_its_emails_is_on_the_wire(bench: Bench, last: int) -> None:
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


@pytest.mark.parametrize("unknown_at", [0, 4])
async def test_a_bundle_with_one_unknown_email_goes_to_the_dlq_after_the_rest(bench: Bench, unknown_at: int) -> None:
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


async def test_a_drain_in_the_middle_of_a_bundle_releases_unsent_emails_and_loses_none(bench: Bench) -> None:
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
    await bench.each_is_sent_once(email_ids)


async def test_a_bundle_with_a_locked_email_is_requeued_until_the_lock_is_released(bench: Bench) -> None:
    email_ids = bench.books.enqueue(5)
    await bench.start(lock_seconds=0.2)
    with bench.books.locked(email_ids[1]):
        await bench.deliver_together(email_ids)
        await bench.settled({"sent": 4, "pending": 1})

    # No relay runs in this test, so no other message points to the email.
    await bench.each_is_sent_once(email_ids)
