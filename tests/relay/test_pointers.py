"""Tests what the relay remembers about published emails. The outbox is real; RabbitMQ is not used."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest

from dispatcher.broker.confirmed import ConfirmedMessages
from dispatcher.errors import BrokerUnavailable
from dispatcher.relay.pointers import BATCH, PointerPublisher
from dispatcher.relay.shares import Shares
from dispatcher.store.connections import connect_async
from dispatcher.store.instants import LATEST
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import DuePointer, DueRange, Outbox
from tests.store.books import Books
from tests.waiting import DEADLINE_SECONDS, until_answer

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
FOR_EVER = 3600.0
NEVER = 1e-9
"""A share so small that published emails are not read again while there is a backlog."""
BURST = 3 * BATCH + 20


class CountingOutbox(Outbox):
    """Records how many emails each statement marks, how many rows each kind of scan reads, and which scans in order are
    complete."""

    def __init__(self, session: psycopg.AsyncConnection) -> None:
        super().__init__(session)
        self.marks: list[int] = []
        self.read_in_order: list[int] = []
        self.complete: list[bool] = []
        self.read_again: list[int] = []
        self.read_on: list[int] = []

    async def find_publish_due(self, limit: int, since_seconds: float | None = None) -> list[DuePointer]:
        rows = await super().find_publish_due(limit, since_seconds)
        self.complete.append(since_seconds is None)
        self.read_in_order.append(len(rows))
        return rows

    async def find_due_of_tenants(self, ranges: Sequence[DueRange]) -> list[DuePointer]:
        rows = await super().find_due_of_tenants(ranges)
        is_check = all(each.until != LATEST for each in ranges)
        (self.read_again if is_check else self.read_on).append(len(rows))
        return rows

    async def mark_published(self, due: Mapping[UUID, datetime]) -> set[UUID]:
        self.marks.append(len(due))
        return await super().mark_published(due)


class Queue:
    """A fake queue with unlimited room that counts messages per email. It refuses the next `refuses` batches, and the
    connection breaks at the next `breaks`."""

    wait_seconds = 0.0

    def __init__(self) -> None:
        self.taken: Counter[UUID] = Counter()
        self.order: list[UUID] = []
        self.room = 1_000_000
        self.refuses = 0
        self.breaks = 0

    def take(self, emails: int) -> None:
        self.room -= emails

    async def publish(self, due: Sequence[DuePointer]) -> list[bool]:
        """Confirms every message, unless `refuses` or `breaks` is set."""
        if self.breaks:
            self.breaks -= 1
            raise BrokerUnavailable("It broke.")
        if self.refuses:
            self.refuses -= 1
            return [False] * len(due)
        self.taken.update(row.email_id for row in due)
        self.order += [row.email_id for row in due]
        return [True] * len(due)

    def pointers(
        self, *, mark_after_seconds: float = FOR_EVER, check_share: float = 1 / 50, complete_share: float = math.inf
    ) -> PointerPublisher:
        """A publisher to this queue."""
        return PointerPublisher(
            Shares({"normal": self}),
            mark_after_seconds=mark_after_seconds,
            check_share=check_share,
            complete_share=complete_share,
        )


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
    """Runs rounds until every due email is published."""
    while await publish_once(pointers, outbox) or pointers.wait_seconds < FOR_EVER:
        pass


def still_due(books: Books) -> set[UUID]:
    return {row["email_id"] for row in books.rows() if row["publish_due_at"]}


async def test_a_burst_that_workers_lease_is_published_once_and_never_marked(
    outbox: CountingOutbox, queue: Queue, books: Books, store: LeaseStore
) -> None:
    email_ids = books.enqueue(BURST)
    pointers = queue.pointers()

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
    """Runs one round; returns whether it read all published emails again, and all of them are leased."""
    seen = len(outbox.read_again)
    await publish_once(pointers, outbox)
    return outbox.read_again[seen:] == [0]


async def test_a_burst_is_not_read_again_in_each_round(outbox: CountingOutbox, queue: Queue, books: Books) -> None:
    email_ids = books.enqueue(BURST)
    pointers = queue.pointers(check_share=NEVER)

    await publish_all(pointers, outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1)
    assert outbox.read_in_order == [BATCH]
    assert outbox.read_again == []
    assert sum(outbox.read_on) < BURST + BATCH


@pytest.mark.parametrize("share", [NEVER, 1 / NEVER])
async def test_more_than_a_batch_with_one_due_time_is_published_once_each(
    outbox: CountingOutbox, queue: Queue, books: Books, share: float
) -> None:
    email_ids = books.enqueue(2 * BURST)
    books.connection.execute("update email_log set publish_due_at = %s", [LONG_AGO])
    later = books.enqueue(10)
    pointers = queue.pointers(check_share=share)

    await publish_all(pointers, outbox)

    assert queue.taken == dict.fromkeys(email_ids + later, 1)


async def test_rows_committed_late_during_a_burst_are_published(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    pointers = queue.pointers()
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


async def test_a_stopping_relay_also_publishes_rows_that_were_committed_late(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    pointers = queue.pointers(check_share=NEVER)
    with psycopg.connect(tables_url) as application:
        late = Books(application).enqueue_one()
        books.enqueue(BURST)
        await publish_all(pointers, outbox)

    assert await publish_once(pointers, outbox) == 0
    assert await pointers.publish_due(outbox, is_last=True) == 1
    await pointers.wait_confirmed()

    assert queue.taken[late] == 1


async def test_a_stopping_relay_publishes_only_what_the_queue_has_room_for(
    outbox: CountingOutbox, queue: Queue, books: Books
) -> None:
    books.enqueue(BURST)
    queue.room = BATCH + 10
    pointers = queue.pointers()

    found = [await pointers.publish_due(outbox, is_last=True) for _ in range(3)]
    await pointers.wait_confirmed()

    assert found == [BATCH, 10, 0]


@pytest.mark.parametrize("fault", ["refuses", "breaks"])
async def test_unconfirmed_messages_of_a_burst_are_published_in_the_next_round(
    outbox: CountingOutbox, queue: Queue, books: Books, fault: str
) -> None:
    email_ids = books.enqueue(BURST)
    pointers = queue.pointers(check_share=NEVER)
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
    pointers = queue.pointers(check_share=NEVER)
    await publish_all(pointers, outbox)

    leases = await store.lease(books.keys(email_ids[:7]), 60)
    await store.release({lease.email_id: lease.token for lease in leases})
    await publish_all(pointers, outbox)
    await pointers.mark_all(outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1) | dict.fromkeys(email_ids[:7], 2)
    assert still_due(books) == set()


async def test_emails_that_no_lease_has_taken_are_marked_a_batch_per_round(
    outbox: CountingOutbox, queue: Queue, books: Books
) -> None:
    books.enqueue(BURST)
    patient = queue.pointers()
    await publish_all(patient, outbox)
    assert outbox.marks == []

    pointers = queue.pointers(mark_after_seconds=0.0)
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

    assert list(confirmed.to_mark(5.0, 3)) == email_ids[:3]
    assert list(confirmed.to_mark(5.0, 100)) == email_ids[:6]


async def test_the_last_marks_are_made_in_batches(outbox: CountingOutbox, queue: Queue, books: Books) -> None:
    books.enqueue(BURST)
    pointers = queue.pointers()
    await publish_all(pointers, outbox)

    await pointers.mark_all(outbox)

    assert outbox.marks == [BATCH, BATCH, BATCH, BURST - 3 * BATCH]
    assert still_due(books) == set()


async def test_many_locked_rows_are_not_tried_in_each_round(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    locked = books.enqueue(2 * BATCH)
    pointers = queue.pointers(mark_after_seconds=3.0)
    with psycopg.connect(tables_url) as person:
        person.execute("select from email_log where email_id = any(%s) for update", [locked])
        await until_answer(lambda: all_are_tried(pointers, outbox))
        tried = list(outbox.marks)
        others = books.enqueue(BATCH - 1)
        found = await until_answer(lambda: publish_once(pointers, outbox))
        left = still_due(books)
        person.rollback()
    await pointers.mark_all(outbox)

    assert tried == [BATCH, BATCH]
    assert found == len(others)
    assert left == {*locked, *others}
    assert sum(outbox.marks[2:]) == len(others) + len(locked)
    assert still_due(books) == set()


async def all_are_tried(pointers: PointerPublisher, outbox: CountingOutbox) -> bool:
    """Runs one round; returns whether the relay has tried to mark every published email."""
    await publish_once(pointers, outbox)
    return sum(outbox.marks) >= 2 * BATCH


async def test_locked_rows_are_tried_again_after_a_while(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    locked = books.enqueue_one()
    pointers = queue.pointers(mark_after_seconds=0.0)
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
    class Never(Queue):
        async def publish(self, _: Sequence[DuePointer]) -> list[bool]:
            await asyncio.Event().wait()
            raise AssertionError

    books.enqueue(1)
    pointers = Never().pointers()
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

    class Broken(Queue):
        async def publish(self, _: Sequence[DuePointer]) -> list[bool]:
            fault = faults.pop()
            await all_are_begun.wait()
            raise fault

    all_are_begun = asyncio.Event()
    pointers = Broken().pointers()
    while faults:
        books.enqueue(1)
        await pointers.publish_due(outbox)
        await asyncio.sleep(0)
    all_are_begun.set()

    with pytest.raises(ZeroDivisionError):
        await pointers.wait_confirmed()


async def test_while_complete_scans_are_slow_a_round_reads_only_what_became_due_since(
    outbox: CountingOutbox, queue: Queue, books: Books, store: LeaseStore
) -> None:
    pointers = queue.pointers(complete_share=NEVER)
    await publish_once(pointers, outbox)  # a complete scan, and the next is due in a second

    email_id = books.enqueue_one()
    late_id = books.enqueue_one()
    books.change(late_id, publish_due_at=LONG_AGO)  # as if its transaction had been open since
    assert await publish_once(pointers, outbox) == 1
    await store.lease(books.keys([email_id]), 60)
    assert await publish_once(pointers, outbox) == 0
    await pointers.mark_all(outbox)

    assert outbox.complete == [True, False, False]
    assert outbox.marks == []  # the email that was leased is forgotten
    assert queue.order == [email_id]
    await until_answer(lambda: publish_once(pointers, outbox))
    assert queue.order == [email_id, late_id]


@pytest.mark.parametrize("change", ["refused", "last round", "no room"])
async def test_a_row_that_is_left_is_found_by_the_next_round(
    outbox: CountingOutbox, queue: Queue, books: Books, change: str
) -> None:
    pointers = queue.pointers(complete_share=NEVER)
    books.change(books.enqueue_one(), publish_due_at=LONG_AGO)
    queue.refuses, queue.room = int(change == "refused"), 0 if change == "no room" else 1_000_000
    await publish_once(pointers, outbox)
    queue.room = 1_000_000
    if change == "last round":
        books.change(books.enqueue_one(), publish_due_at=LONG_AGO)

    await pointers.publish_due(outbox, is_last=change == "last round")
    await pointers.wait_confirmed()

    assert set(queue.taken) == {row["email_id"] for row in books.rows()}


async def test_published_emails_that_wait_for_a_lease_are_published_once_beside_slow_scans(
    outbox: CountingOutbox, queue: Queue, books: Books
) -> None:
    pointers = queue.pointers(complete_share=NEVER)
    books.change(books.enqueue_one(), publish_due_at=LONG_AGO)
    await publish_once(pointers, outbox)
    for _ in range(3):
        books.enqueue_one()
        await publish_once(pointers, outbox)
    while outbox.complete[1:].count(True) < 2:
        await publish_once(pointers, outbox)

    assert len(queue.order) == len(set(queue.order)) == 4
