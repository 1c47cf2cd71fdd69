"""What the relay remembers of its messages, with a real outbox and no RabbitMQ."""

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
from dispatcher.relay.pointers import BATCH, Pointers
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import THE_START, DuePointer, Outbox
from tests.store.books import Books
from tests.waiting import DEADLINE_SECONDS, until_answer

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
FOR_EVER = 3600.0
NEVER = 1e-9
"""A share of the time that allows a full look within a lifetime where little is remembered, and nowhere else."""
BURST = 3 * BATCH + 20


class CountingOutbox(Outbox):
    """Counts what is marked by each statement, and the rows that looks read from the start and otherwise."""

    def __init__(self, session: psycopg.AsyncConnection) -> None:
        super().__init__(session)
        self.marks: list[int] = []
        self.read_fully: list[int] = []
        self.read_on: list[int] = []

    async def find_publish_due(self, limit: int, *, since: datetime = THE_START) -> list[DuePointer]:
        """As the outbox does."""
        rows = await super().find_publish_due(limit, since=since)
        (self.read_fully if since == THE_START else self.read_on).append(len(rows))
        return rows

    async def mark_published(self, due: Mapping[UUID, datetime]) -> set[UUID]:
        """As the outbox does."""
        self.marks.append(len(due))
        return await super().mark_published(due)


class Queue:
    """Takes messages as RabbitMQ does; counts them by email.

    Attributes:
        refuses: How many batches it takes no message of; `breaks`: during how many the connection breaks.
    """

    def __init__(self) -> None:
        self.taken: Counter[UUID] = Counter()
        self.refuses = 0
        self.breaks = 0

    async def publish(self, due: list[DuePointer]) -> list[bool]:
        """Confirms every message."""
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
    """Empty."""
    return Queue()


@pytest.fixture
async def outbox(tables_url: str) -> AsyncIterator[CountingOutbox]:
    """The relay's statements."""
    async with await connect_async(tables_url, name="relay") as session:
        yield CountingOutbox(session)


async def look_once(pointers: Pointers, outbox: Outbox) -> int:
    """A look, and everything that it began is confirmed or known not to be."""
    found = await pointers.look(outbox)
    await pointers.arrived()
    return found


async def publish_all(pointers: Pointers, outbox: Outbox) -> None:
    """Looks until there is nothing to begin."""
    while await look_once(pointers, outbox):
        pass


def still_due(books: Books) -> set[UUID]:
    return {row["email_id"] for row in books.rows() if row["publish_due_at"]}


async def test_a_burst_that_leases_drain_is_published_once_and_never_marked(
    outbox: CountingOutbox, queue: Queue, books: Books, store: LeaseStore
) -> None:
    email_ids = books.enqueue(BURST)
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER)

    await publish_all(pointers, outbox)
    await store.lease(books.keys(email_ids), 60)
    leased = books.rows()
    await until_answer(lambda: forgets_all(pointers, outbox))
    await pointers.mark_all(outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1)
    assert outbox.marks == []
    assert books.rows() == leased
    assert still_due(books) == set()


async def forgets_all(pointers: Pointers, outbox: CountingOutbox) -> bool:
    """Whether a full look has come upon nothing; the answer of one that goes on says nothing of what is behind it."""
    seen = len(outbox.read_fully)
    await look_once(pointers, outbox)
    return outbox.read_fully[seen:] == [0]


async def test_a_burst_is_not_read_again_at_each_look(outbox: CountingOutbox, queue: Queue, books: Books) -> None:
    email_ids = books.enqueue(BURST)
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER, full_look_share=NEVER)

    await publish_all(pointers, outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1)
    assert outbox.read_fully == [BATCH, 2 * BATCH]
    assert sum(outbox.read_on) < 2 * BATCH


@pytest.mark.parametrize("share", [NEVER, 1 / NEVER])
async def test_more_than_a_batch_that_is_due_since_one_instant_is_published_each_once(
    outbox: CountingOutbox, queue: Queue, books: Books, share: float
) -> None:
    email_ids = books.enqueue(2 * BURST)
    books.connection.execute("update email_log set publish_due_at = %s", [LONG_AGO])
    later = books.enqueue(10)
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER, full_look_share=share)

    await publish_all(pointers, outbox)

    assert queue.taken == dict.fromkeys(email_ids + later, 1)


async def test_what_is_committed_late_in_a_burst_is_published(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER)
    with psycopg.connect(tables_url) as application:
        late = Books(application).enqueue(2 * BATCH)
        books.enqueue(BURST)
        await publish_all(pointers, outbox)

    async def have_come() -> bool:
        await look_once(pointers, outbox)
        return set(late) <= set(queue.taken)

    await until_answer(have_come)
    await publish_all(pointers, outbox)
    assert set(queue.taken.values()) == {1}
    assert len(queue.taken) == len(late) + BURST


async def test_more_than_a_batch_that_is_committed_late_hides_neither_its_rest_nor_what_comes_later(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER, full_look_share=NEVER)
    with psycopg.connect(tables_url) as application:
        Books(application).enqueue(BATCH + 1)
        books.enqueue(BURST)
        await publish_all(pointers, outbox)
    books.enqueue(10)

    found = [await pointers.look(outbox, is_last=True)]
    await pointers.arrived()
    found += [await look_once(pointers, outbox) for _ in range(3)]

    assert found == [10, 0, 0, 0]
    assert await pointers.look(outbox, is_last=True) == BATCH
    await pointers.arrived()
    books.enqueue(20)
    assert [await look_once(pointers, outbox) for _ in range(3)] == [1, 20, 0]
    assert set(queue.taken.values()) == {1}


async def test_a_relay_that_stops_looks_behind_it_at_last(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER, full_look_share=NEVER)
    with psycopg.connect(tables_url) as application:
        late = Books(application).enqueue_one()
        books.enqueue(BURST)
        await publish_all(pointers, outbox)

    assert await look_once(pointers, outbox) == 0
    assert await pointers.look(outbox, is_last=True) == 1
    await pointers.arrived()

    assert queue.taken[late] == 1


@pytest.mark.parametrize("fault", ["refuses", "breaks"])
async def test_what_is_not_confirmed_in_a_burst_is_published_at_the_next_look(
    outbox: CountingOutbox, queue: Queue, books: Books, fault: str
) -> None:
    email_ids = books.enqueue(BURST)
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER, full_look_share=NEVER)
    for _ in range(2):
        await look_once(pointers, outbox)
    setattr(queue, fault, 1)
    for _ in range(2):
        try:
            await look_once(pointers, outbox)
        except BrokerUnavailable:
            assert fault == "breaks"

    await publish_all(pointers, outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1)


async def test_what_becomes_due_again_while_it_is_remembered_is_published_again(
    outbox: CountingOutbox, queue: Queue, books: Books, store: LeaseStore
) -> None:
    email_ids = books.enqueue(BURST)
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER, full_look_share=NEVER)
    await publish_all(pointers, outbox)

    leases = await store.lease(books.keys(email_ids[:7]), 60)
    await store.release({lease.email_id: lease.token for lease in leases})
    await publish_all(pointers, outbox)
    await pointers.mark_all(outbox)

    assert queue.taken == dict.fromkeys(email_ids, 1) | dict.fromkeys(email_ids[:7], 2)
    assert still_due(books) == set()


async def test_beyond_what_may_be_remembered_the_oldest_are_marked(
    outbox: CountingOutbox, queue: Queue, books: Books
) -> None:
    email_ids = books.enqueue(BURST)
    due_at = {row["email_id"]: row["publish_due_at"] for row in books.rows()}
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER, most_unmarked=BATCH)

    await publish_all(pointers, outbox)
    await look_once(pointers, outbox)

    left = still_due(books)
    assert len(left) == BATCH
    assert min(due_at[i] for i in left) >= max(due_at[i] for i in set(email_ids) - left)
    assert queue.taken == dict.fromkeys(email_ids, 1)


async def test_what_no_lease_has_taken_for_long_is_marked_a_batch_at_each_look(
    outbox: CountingOutbox, queue: Queue, books: Books
) -> None:
    books.enqueue(BURST)
    patient = Pointers(queue.publish, mark_after_seconds=FOR_EVER)
    await publish_all(patient, outbox)
    assert outbox.marks == []

    pointers = Pointers(queue.publish, mark_after_seconds=0.0)
    looks = 0
    while still_due(books):
        await look_once(pointers, outbox)
        looks += 1
        assert len(outbox.marks) <= looks

    assert max(outbox.marks) <= BATCH
    assert sum(outbox.marks) == BURST


def test_no_more_is_to_be_marked_than_was_asked_for() -> None:
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
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER)
    await publish_all(pointers, outbox)

    await pointers.mark_all(outbox)

    assert outbox.marks == [BATCH, BATCH, BATCH, BURST - 3 * BATCH]
    assert still_due(books) == set()


async def test_many_that_somebody_has_locked_are_not_tried_at_each_look(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    locked = books.enqueue(2 * BATCH)
    pointers = Pointers(queue.publish, mark_after_seconds=FOR_EVER, most_unmarked=0)
    with psycopg.connect(tables_url) as person:
        person.execute("select from email_log where email_id = any(%s) for update", [locked])
        for _ in range(4):
            await look_once(pointers, outbox)
        tried = list(outbox.marks)
        others = books.enqueue(BATCH - 1)
        found = [await look_once(pointers, outbox) for _ in range(3)]
        left = still_due(books)
        person.rollback()
    await pointers.mark_all(outbox)

    assert tried == [BATCH, BATCH]
    assert found == [len(others), 0, 0]
    assert left == set(locked)
    assert outbox.marks[2:] == [len(others), BATCH, BATCH]
    assert still_due(books) == set()


async def test_what_was_locked_is_tried_again_after_a_while(
    outbox: CountingOutbox, queue: Queue, books: Books, tables_url: str
) -> None:
    locked = books.enqueue_one()
    pointers = Pointers(queue.publish, mark_after_seconds=0.0)
    with psycopg.connect(tables_url) as person:
        Books(person).lock(locked)
        for _ in range(3):
            await look_once(pointers, outbox)
        tried = len(outbox.marks)

    await look_once(pointers, outbox)

    assert tried > 0
    assert still_due(books) == set()
    assert queue.taken == {locked: 1}


async def test_a_relay_that_ends_waits_for_no_confirm(outbox: CountingOutbox, books: Books) -> None:
    async def never(_: list[DuePointer]) -> list[bool]:
        await asyncio.Event().wait()
        raise AssertionError

    books.enqueue(1)
    pointers = Pointers(never, mark_after_seconds=FOR_EVER)
    await pointers.look(outbox)
    await asyncio.sleep(0)
    assert pointers.are_on_the_way

    async with asyncio.timeout(DEADLINE_SECONDS):
        await pointers.close()

    assert not pointers.are_on_the_way


async def test_a_fault_of_our_own_is_raised_even_where_rabbitmq_is_away_as_well(
    outbox: CountingOutbox, books: Books
) -> None:
    faults: list[Exception] = [*[BrokerUnavailable("It broke.")] * 7, ZeroDivisionError()]

    async def break_off(_: list[DuePointer]) -> list[bool]:
        fault = faults.pop()
        await all_are_begun.wait()
        raise fault

    all_are_begun = asyncio.Event()
    pointers = Pointers(break_off, mark_after_seconds=FOR_EVER)
    while faults:
        books.enqueue(1)
        await pointers.look(outbox)
        await asyncio.sleep(0)
    all_are_begun.set()

    with pytest.raises(ZeroDivisionError):
        await pointers.arrived()
