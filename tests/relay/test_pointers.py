"""Tests what the relay remembers about published emails. The outbox is real; RabbitMQ is not used."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest

from dispatcher.broker.confirmed import ConfirmedMessages
from dispatcher.errors import BrokerUnavailable
from dispatcher.relay.pointers import BATCH, PointerPublisher
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import THE_START, DuePointer, Outbox
from tests.store.books import Books
from tests.waiting import DEADLINE_SECONDS, until_answer

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
FOR_EVER = 3600.0
NEVER = 1e-9
"""A share so small that no full scan runs while the relay remembers many emails."""
BURST = 3 * BATCH + 20


class CountingOutbox(Outbox):
    """Records how many emails each statement marks, and how many rows each full scan and each other scan reads."""

    def __init__(self, session: psycopg.AsyncConnection) -> None:
        super().__init__(session)
        self.marks: list[int] = []
        self.read_fully: list[int] = []
        self.read_on: list[int] = []

    async def find_publish_due(self, limit: int, *, since: datetime = THE_START) -> list[DuePointer]:
        rows = await super().find_publish_due(limit, since=since)
        (self.read_fully if since == THE_START else self.read_on).append(len(rows))
        return rows

    async def mark_published(self, due: Mapping[UUID, datetime]) -> set[UUID]:
        self.marks.append(len(due))
        return await super().mark_published(due)


class Queue:
    """A fake queue that counts messages per email.

    Attributes:
        refuses: How many of the next batches the queue refuses. `breaks`: How many of the next batches break the
            connection.
    """

    def __init__(self) -> None:
        self.taken: Counter[UUID] = Counter()
        self.refuses = 0
        self.breaks = 0

    async def publish(self, due: list[DuePointer]) -> list[bool]:
        """Confirms every message, unless `refuses` or `breaks` is set."""
        if self.breaks:
            self.breaks -= 1
            raise BrokerUnavailable("It broke.")
        if self.refuses:
            self.refuses -= 1
            return [False] * len(due)
        self.taken.update(row.email_id for row in due)
        return [True] * len(due)


@pytest.fixture
def queue() -> Queue:
    """An empty queue."""
    return Queue()


@pytest.fixture
async def outbox(tables_url: str) -> AsyncIterator[CountingOutbox]:
    """The relay's outbox."""
    async with await connect_async(tables_url, name="relay") as session:
        yield CountingOutbox(session)


async def publish_once(pointers: PointerPublisher, outbox: Outbox) -> int:
    """Runs one round, and waits until all its messages are confirmed or refused."""
    found = await pointers.publish_due(outbox)
    await pointers.wait_confirmed()
    return found


async def publish_all(pointers: PointerPublisher, outbox: Outbox) -> None:
    """Runs rounds until nothing is due."""
    while await publish_once(pointers, outbox):
        pass


def still_due(books: Books) -> set[UUID]:
    return {row["email_id"] for row in books.rows() if row["publish_due_at"]}


async def test_a_burst_that_workers_lease_is_published_once_and_never_marked(
    outbox: CountingOutbox, queue: Queue, books: Books, store: LeaseStore
) -> None:
    email_ids = books.enqueue(BURST)
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER)

    await publish_all(pointers, outbox)
    await store.lease(books.keys(email_ids), 60)
    leased = books.rows()
    await until_answer(lambda: full_scan_found_nothing(pointers, outbox))
    await pointers.mark_all(outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1)
    assert outbox.marks == []
    assert books.rows() == leased
    assert still_due(books) == set()


async def full_scan_found_nothing(pointers: PointerPublisher, outbox: CountingOutbox) -> bool:
    """Runs one round; returns whether it made a full scan that found nothing. A scan that continues does not read
    earlier rows."""
    seen = len(outbox.read_fully)
    await publish_once(pointers, outbox)
    return outbox.read_fully[seen:] == [0]


async def test_a_burst_is_not_read_again_in_each_round(outbox: CountingOutbox, queue: Queue, books: Books) -> None:
    email_ids = books.enqueue(BURST)
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER, full_scan_share=NEVER)

    await publish_all(pointers, outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1)
    assert outbox.read_fully == [BATCH, 2 * BATCH]
    assert sum(outbox.read_on) < 2 * BATCH


@pytest.mark.parametrize("share", [NEVER, 1 / NEVER])
async def test_more_than_a_batch_with_one_due_time_is_published_once_each(
    outbox: CountingOutbox, queue: Queue, books: Books, share: float
) -> None:
    email_ids = books.enqueue(2 * BURST)
    books.connection.execute("update email_log set publish_due_at = %s", [LONG_AGO])
    later = books.enqueue(10)
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER, full_scan_share=share)

    await publish_all(pointers, outbox)

    assert queue.taken == dict.fromkeys(email_ids + later, 1)


async def test_rows_committed_late_during_a_burst_are_published(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER)
    with psycopg.connect(tables_url) as application:
        late = Books(application).enqueue(2 * BATCH)
        books.enqueue(BURST)
        await publish_all(pointers, outbox)

    async def have_come() -> bool:
        await publish_once(pointers, outbox)
        return set(late) <= set(queue.taken)

    await until_answer(have_come)
    await publish_all(pointers, outbox)
    assert set(queue.taken.values()) == {1}
    assert len(queue.taken) == len(late) + BURST


async def test_more_than_a_batch_of_late_commits_hides_no_other_rows(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER, full_scan_share=NEVER)
    with psycopg.connect(tables_url) as application:
        Books(application).enqueue(BATCH + 1)
        books.enqueue(BURST)
        await publish_all(pointers, outbox)
    books.enqueue(10)

    found = [await pointers.publish_due(outbox, is_last=True)]
    await pointers.wait_confirmed()
    found += [await publish_once(pointers, outbox) for _ in range(3)]

    assert found == [10, 0, 0, 0]
    assert await pointers.publish_due(outbox, is_last=True) == BATCH
    await pointers.wait_confirmed()
    books.enqueue(20)
    assert [await publish_once(pointers, outbox) for _ in range(3)] == [1, 20, 0]
    assert set(queue.taken.values()) == {1}


async def test_a_stopping_relay_ends_with_a_full_scan(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER, full_scan_share=NEVER)
    with psycopg.connect(tables_url) as application:
        late = Books(application).enqueue_one()
        books.enqueue(BURST)
        await publish_all(pointers, outbox)

    assert await publish_once(pointers, outbox) == 0
    assert await pointers.publish_due(outbox, is_last=True) == 1
    await pointers.wait_confirmed()

    assert queue.taken[late] == 1


@pytest.mark.parametrize("fault", ["refuses", "breaks"])
async def test_unconfirmed_messages_of_a_burst_are_published_in_the_next_round(
    outbox: CountingOutbox, queue: Queue, books: Books, fault: str
) -> None:
    email_ids = books.enqueue(BURST)
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER, full_scan_share=NEVER)
    for _ in range(2):
        await publish_once(pointers, outbox)
    setattr(queue, fault, 1)
    for _ in range(2):
        try:
            await publish_once(pointers, outbox)
        except BrokerUnavailable:
            assert fault == "breaks"

    await publish_all(pointers, outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1)


async def test_an_email_that_becomes_due_again_while_remembered_is_published_again(
    outbox: CountingOutbox, queue: Queue, books: Books, store: LeaseStore
) -> None:
    email_ids = books.enqueue(BURST)
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER, full_scan_share=NEVER)
    await publish_all(pointers, outbox)

    leases = await store.lease(books.keys(email_ids[:7]), 60)
    await store.release({lease.email_id: lease.token for lease in leases})
    await publish_all(pointers, outbox)
    await pointers.mark_all(outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1) | dict.fromkeys(email_ids[:7], 2)
    assert still_due(books) == set()


async def test_beyond_the_memory_limit_the_oldest_emails_are_marked(
    outbox: CountingOutbox, queue: Queue, books: Books
) -> None:
    email_ids = books.enqueue(BURST)
    due_at = {row["email_id"]: row["publish_due_at"] for row in books.rows()}
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER, max_unmarked=BATCH)

    await publish_all(pointers, outbox)
    await publish_once(pointers, outbox)

    left = still_due(books)
    assert len(left) == BATCH
    assert min(due_at[i] for i in left) >= max(due_at[i] for i in set(email_ids) - left)
    assert queue.taken == dict.fromkeys(email_ids, 1)


async def test_emails_that_no_lease_has_taken_are_marked_a_batch_per_round(
    outbox: CountingOutbox, queue: Queue, books: Books
) -> None:
    books.enqueue(BURST)
    patient = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER)
    await publish_all(patient, outbox)
    assert outbox.marks == []

    pointers = PointerPublisher(queue.publish, mark_after_seconds=0.0)
    looks = 0
    while still_due(books):
        await publish_once(pointers, outbox)
        looks += 1
        assert len(outbox.marks) <= looks

    assert max(outbox.marks) <= BATCH
    assert sum(outbox.marks) == BURST


def test_no_more_emails_are_marked_than_requested() -> None:
    confirmed = ConfirmedMessages()
    email_ids = [UUID(int=number) for number in range(10)]
    for second, email_id in enumerate(email_ids):
        confirmed.add({email_id: LONG_AGO}, float(second))

    assert list(confirmed.to_mark(5.0, 3, most_waiting=10)) == email_ids[:3]
    assert list(confirmed.to_mark(5.0, 7, most_waiting=2)) == email_ids[:7]
    assert list(confirmed.to_mark(5.0, 100, most_waiting=2)) == email_ids[:8]
    assert list(confirmed.to_mark(5.0, 100, most_waiting=9)) == email_ids[:6]


async def test_the_last_marks_are_made_in_batches(outbox: CountingOutbox, queue: Queue, books: Books) -> None:
    books.enqueue(BURST)
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER)
    await publish_all(pointers, outbox)

    await pointers.mark_all(outbox)

    assert outbox.marks == [BATCH, BATCH, BATCH, BURST - 3 * BATCH]
    assert still_due(books) == set()


async def test_many_locked_rows_are_not_tried_in_each_round(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    locked = books.enqueue(2 * BATCH)
    pointers = PointerPublisher(queue.publish, mark_after_seconds=FOR_EVER, max_unmarked=0)
    with psycopg.connect(tables_url) as person:
        person.execute("select from email_log where email_id = any(%s) for update", [locked])
        for _ in range(4):
            await publish_once(pointers, outbox)
        tried = list(outbox.marks)
        others = books.enqueue(BATCH - 1)
        found = [await publish_once(pointers, outbox) for _ in range(3)]
        left = still_due(books)
        person.rollback()
    await pointers.mark_all(outbox)

    assert tried == [BATCH, BATCH]
    assert found == [len(others), 0, 0]
    assert left == set(locked)
    assert outbox.marks[2:] == [len(others), BATCH, BATCH]
    assert still_due(books) == set()


async def test_locked_rows_are_tried_again_after_a_while(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    locked = books.enqueue_one()
    pointers = PointerPublisher(queue.publish, mark_after_seconds=0.0)
    with psycopg.connect(tables_url) as person:
        Books(person).lock(locked)
        for _ in range(3):
            await publish_once(pointers, outbox)
        tried = len(outbox.marks)

    await publish_once(pointers, outbox)

    assert tried > 0
    assert still_due(books) == set()
    assert queue.taken == {locked: 1}


async def test_a_closed_publisher_waits_for_no_confirm(outbox: CountingOutbox, books: Books) -> None:
    async def never(_: list[DuePointer]) -> list[bool]:
        await asyncio.Event().wait()
        raise AssertionError

    books.enqueue(1)
    pointers = PointerPublisher(never, mark_after_seconds=FOR_EVER)
    await pointers.publish_due(outbox)
    await asyncio.sleep(0)
    assert pointers.has_unconfirmed

    async with asyncio.timeout(DEADLINE_SECONDS):
        await pointers.close()

    assert not pointers.has_unconfirmed


async def test_an_unexpected_error_is_raised_even_if_rabbitmq_is_unreachable_too(
    outbox: CountingOutbox, books: Books
) -> None:
    faults: list[Exception] = [*[BrokerUnavailable("It broke.")] * 7, ZeroDivisionError()]

    async def break_off(_: list[DuePointer]) -> list[bool]:
        fault = faults.pop()
        await all_are_begun.wait()
        raise fault

    all_are_begun = asyncio.Event()
    pointers = PointerPublisher(break_off, mark_after_seconds=FOR_EVER)
    while faults:
        books.enqueue(1)
        await pointers.publish_due(outbox)
        await asyncio.sleep(0)
    all_are_begun.set()

    with pytest.raises(ZeroDivisionError):
        await pointers.wait_confirmed()
