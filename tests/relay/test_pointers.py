"""What the relay remembers about published emails, and how its rounds go on. The outbox is real, RabbitMQ is not."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest

from dispatcher.domain.controls import Controls, TenantLimit
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
BURST = 2 * BATCH + 20
ROOM = 1_000_000


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
    """A fake queue with room for all that counts messages per email. It refuses the next `refuses` batches, and the
    connection breaks at the next `breaks`."""

    wait_seconds = 0.0

    def __init__(self) -> None:
        self.taken: Counter[UUID] = Counter()
        self.order: list[UUID] = []
        self.room = ROOM
        self.refuses = 0
        self.breaks = 0

    def take(self, emails: int) -> None:
        self.room -= emails

    async def publish(self, due: Sequence[DuePointer]) -> list[bool]:
        if self.breaks:
            self.breaks -= 1
            raise BrokerUnavailable("It broke.")
        if self.refuses:
            self.refuses -= 1
            return [False] * len(due)
        self.taken.update(row.email_id for row in due)
        self.order += [row.email_id for row in due]
        return [True] * len(due)

    def pointers(self, **options: float) -> PointerPublisher:
        given = {"mark_after_seconds": FOR_EVER, "check_share": 1 / 50, "complete_share": math.inf, **options}
        return PointerPublisher(Shares({"normal": self}), **given)


class Publishing:
    """Due emails in the tables, and the publishers of a relay to a queue that is not RabbitMQ's."""

    def __init__(self, outbox: CountingOutbox, books: Books, url: str) -> None:
        self.outbox = outbox
        self.books = books
        self.url = url
        self.queue = Queue()

    async def once(self, pointers: PointerPublisher) -> int:
        """Runs one round, and waits until all its messages are confirmed or refused."""
        found = await pointers.publish_due(self.outbox)
        await pointers.wait_confirmed()
        return found

    async def all(self, pointers: PointerPublisher) -> None:
        """Runs rounds until every due email is published."""
        while await self.once(pointers) or pointers.wait_seconds < FOR_EVER:
            pass

    async def until(self, pointers: PointerPublisher, condition: Callable[[], bool]) -> None:
        await until_answer(lambda: self.once(pointers), lambda _: condition())

    def still_due(self) -> set[UUID]:
        rows = self.books.select("select email_id from email_log where publish_due_at is not null")
        return {row["email_id"] for row in rows}

    def enqueue_late(self) -> UUID:
        """Enqueues an email as if its transaction had been open for long."""
        email_id = self.books.enqueue_one()
        self.books.change(email_id, publish_due_at=LONG_AGO)
        return email_id


@pytest.fixture
async def relay(tables_url: str, books: Books) -> AsyncIterator[Publishing]:
    async with await connect_async(tables_url, name="relay") as session:
        yield Publishing(CountingOutbox(session), books, tables_url)


async def test_a_burst_that_workers_lease_is_published_once_without_marks(relay: Publishing, store: LeaseStore) -> None:
    email_ids = relay.books.enqueue(BURST)
    pointers = relay.queue.pointers()

    await relay.all(pointers)
    await store.lease(relay.books.keys(email_ids), 60)
    leased = relay.books.rows()
    await relay.until(pointers, lambda: relay.outbox.read_again[-1:] == [0])  # all published emails are leased
    await pointers.mark_all(relay.outbox)

    assert relay.queue.taken == dict.fromkeys(email_ids, 1)
    assert relay.outbox.marks == []
    assert relay.books.rows() == leased
    assert relay.still_due() == set()


async def test_a_burst_is_not_read_again_in_each_round_and_its_last_marks_are_in_batches(
    relay: Publishing,
) -> None:
    email_ids = relay.books.enqueue(BURST)
    pointers = relay.queue.pointers(check_share=NEVER)

    await relay.all(pointers)

    assert relay.queue.taken == dict.fromkeys(email_ids, 1)
    assert relay.outbox.read_in_order == [BATCH]
    assert relay.outbox.read_again == []
    assert sum(relay.outbox.read_on) < BURST + BATCH
    assert relay.queue.room == ROOM - BURST  # turns without an email were given back
    await pointers.mark_all(relay.outbox)
    assert relay.outbox.marks == [BATCH, BATCH, BURST - 2 * BATCH]
    assert relay.still_due() == set()


@pytest.mark.parametrize("share", [NEVER, 1 / NEVER])
async def test_more_than_a_batch_with_one_due_time_is_published_once_each(relay: Publishing, share: float) -> None:
    email_ids = relay.books.enqueue(BURST)
    relay.books.connection.execute("update email_log set publish_due_at = %s", [LONG_AGO])
    later = relay.books.enqueue(10)

    await relay.all(relay.queue.pointers(check_share=share))

    assert relay.queue.taken == dict.fromkeys(email_ids + later, 1)


async def test_rows_committed_late_during_a_burst_are_published(relay: Publishing) -> None:
    pointers = relay.queue.pointers()
    with psycopg.connect(relay.url) as application:
        late = Books(application).enqueue(BATCH + 20)
        relay.books.enqueue(BURST)
        await relay.all(pointers)

    await relay.until(pointers, lambda: set(late) <= set(relay.queue.taken))
    await relay.all(pointers)
    assert set(relay.queue.taken.values()) == {1}
    assert len(relay.queue.taken) == len(late) + BURST


async def test_a_stopping_relay_also_publishes_rows_that_were_committed_late(relay: Publishing) -> None:
    pointers = relay.queue.pointers(check_share=NEVER)
    with psycopg.connect(relay.url) as application:
        late = Books(application).enqueue_one()
        relay.books.enqueue(BURST)
        await relay.all(pointers)

    assert await relay.once(pointers) == 0
    assert await pointers.publish_due(relay.outbox, is_last=True) == 1
    await pointers.wait_confirmed()

    assert relay.queue.taken[late] == 1


@pytest.mark.parametrize("fault", ["refuses", "breaks"])
async def test_unconfirmed_messages_of_a_burst_are_published_in_the_next_round(relay: Publishing, fault: str) -> None:
    email_ids = relay.books.enqueue(BURST)
    pointers = relay.queue.pointers(check_share=NEVER)
    await relay.once(pointers)
    setattr(relay.queue, fault, 1)
    for _ in range(2):
        try:
            await relay.once(pointers)
        except BrokerUnavailable:
            assert fault == "breaks"

    await relay.all(pointers)

    assert relay.queue.taken == dict.fromkeys(email_ids, 1)


async def test_an_email_due_again_while_remembered_is_published_again(relay: Publishing, store: LeaseStore) -> None:
    email_ids = relay.books.enqueue(BURST)
    pointers = relay.queue.pointers(check_share=NEVER)
    await relay.all(pointers)

    leases = await store.lease(relay.books.keys(email_ids[:7]), 60)
    await store.release({lease.email_id: lease.token for lease in leases})
    await relay.all(pointers)
    await pointers.mark_all(relay.outbox)

    assert relay.queue.taken == dict.fromkeys(email_ids, 1) | dict.fromkeys(email_ids[:7], 2)
    assert relay.still_due() == set()


async def test_emails_that_no_lease_has_taken_are_marked_a_batch_per_round(relay: Publishing) -> None:
    relay.books.enqueue(BURST)
    await relay.all(relay.queue.pointers())
    assert relay.outbox.marks == []

    pointers = relay.queue.pointers(mark_after_seconds=0.0)
    looks = 0
    while relay.still_due():
        await relay.once(pointers)
        looks += 1
        assert len(relay.outbox.marks) <= looks

    assert max(relay.outbox.marks) <= BATCH
    assert sum(relay.outbox.marks) == BURST


async def test_many_locked_rows_are_not_tried_in_each_round(relay: Publishing) -> None:
    locked = relay.books.enqueue(2 * BATCH)
    pointers = relay.queue.pointers(mark_after_seconds=3.0)
    with relay.books.locked(*locked) as person:
        await relay.until(pointers, lambda: sum(relay.outbox.marks) >= 2 * BATCH)
        tried = list(relay.outbox.marks)
        others = relay.books.enqueue(BATCH - 1)
        found = await until_answer(lambda: relay.once(pointers))
        left = relay.still_due()
        person.rollback()
    await pointers.mark_all(relay.outbox)

    assert tried == [BATCH, BATCH]
    assert found == len(others)
    assert left == {*locked, *others}
    assert sum(relay.outbox.marks[2:]) == len(others) + len(locked)
    assert relay.still_due() == set()


async def test_locked_rows_are_tried_again_after_a_while(relay: Publishing) -> None:
    locked = relay.books.enqueue_one()
    pointers = relay.queue.pointers(mark_after_seconds=0.0)
    with relay.books.locked(locked):
        for _ in range(3):
            await relay.once(pointers)
        tried = len(relay.outbox.marks)

    await relay.once(pointers)

    assert tried > 0
    assert relay.still_due() == set()
    assert relay.queue.taken == {locked: 1}


async def test_while_complete_scans_are_slow_a_round_reads_only_what_became_due_since(
    relay: Publishing, store: LeaseStore
) -> None:
    pointers = relay.queue.pointers(complete_share=NEVER)
    await relay.once(pointers)  # a complete scan, and the next is due in a second

    email_id, late_id = relay.books.enqueue_one(), relay.enqueue_late()
    assert await relay.once(pointers) == 1
    await store.lease(relay.books.keys([email_id]), 60)
    assert await relay.once(pointers) == 0
    await pointers.mark_all(relay.outbox)

    assert relay.outbox.complete == [True, False, False]
    assert relay.outbox.marks == []  # the email that was leased is forgotten
    assert relay.queue.order == [email_id]
    await until_answer(lambda: relay.once(pointers))
    assert relay.queue.order == [email_id, late_id]


@pytest.mark.parametrize("change", ["refused", "last round", "no room"])
async def test_a_row_that_is_left_is_found_by_the_next_round(relay: Publishing, change: str) -> None:
    pointers, queue = relay.queue.pointers(complete_share=NEVER), relay.queue
    relay.enqueue_late()
    queue.refuses, queue.room = int(change == "refused"), 0 if change == "no room" else 1_000_000
    await relay.once(pointers)
    queue.room = 1_000_000
    if change == "last round":
        relay.enqueue_late()

    await pointers.publish_due(relay.outbox, is_last=change == "last round")
    await pointers.wait_confirmed()

    assert set(queue.taken) == {row["email_id"] for row in relay.books.rows()}


async def test_published_emails_that_wait_for_a_lease_are_published_once_beside_slow_scans(relay: Publishing) -> None:
    pointers = relay.queue.pointers(complete_share=NEVER)
    relay.enqueue_late()
    await relay.once(pointers)
    for _ in range(3):
        relay.books.enqueue_one()
        await relay.once(pointers)
    await relay.until(pointers, lambda: relay.outbox.complete[1:].count(True) >= 2)

    assert len(relay.queue.order) == len(set(relay.queue.order)) == 4


async def test_a_closed_publisher_waits_for_no_confirm(relay: Publishing) -> None:
    class Never(Queue):
        async def publish(self, _: Sequence[DuePointer]) -> list[bool]:
            await asyncio.Event().wait()
            raise AssertionError

    relay.books.enqueue(1)
    pointers = Never().pointers()
    await pointers.publish_due(relay.outbox)
    await asyncio.sleep(0)
    assert pointers.has_unconfirmed

    async with asyncio.timeout(DEADLINE_SECONDS):
        await pointers.close()

    assert not pointers.has_unconfirmed


@pytest.mark.parametrize(
    ("waiting", "turns"),
    [
        ({"urgent": 1, "normal": 400}, {"urgent": 1, "normal": 400}),
        ({"urgent": 400, "normal": 1, "bulk": 90}, {"urgent": 400, "normal": 1, "bulk": 90}),
        ({"urgent": 400, "normal": 400}, {"urgent": 250, "normal": 250}),
        ({"urgent": 100, "normal": 900, "bulk": 900}, {"urgent": 100, "normal": 200, "bulk": 200}),
        ({"urgent": 900, "normal": 900, "bulk": 900}, {"urgent": 166, "normal": 167, "bulk": 167}),
    ],
)
def test_a_batch_leaves_no_email_out_while_it_has_room_and_lanes_with_many_emails_get_equal_parts(
    waiting: Mapping[str, int], turns: Mapping[str, int]
) -> None:
    shares = Shares({lane: Queue() for lane in ("urgent", "normal", "bulk")})

    order = shares.allot({(lane, "acme"): emails for lane, emails in waiting.items()}, BATCH)

    assert Counter(lane for lane, _ in order) == turns
    assert [lane for lane, _ in order] == sorted((lane for lane, _ in order), key=list(waiting).index)


def test_a_tenant_without_tokens_waits_for_one() -> None:
    shares = Shares({"normal": Queue()})
    shares.set_controls(Controls(tenants={"acme": TenantLimit("acme", per_second=4.0)}))

    assert shares.allot({("normal", "acme"): 5}, BATCH) == []
    assert 0 < shares.wait_seconds <= 1 / 4


async def test_an_unexpected_error_is_raised_even_if_rabbitmq_is_unreachable_too(relay: Publishing) -> None:
    faults: list[Exception] = [*[BrokerUnavailable("It broke.")] * 7, ZeroDivisionError()]

    class Broken(Queue):
        async def publish(self, _: Sequence[DuePointer]) -> list[bool]:
            fault = faults.pop()
            await all_are_begun.wait()
            raise fault

    all_are_begun = asyncio.Event()
    pointers = Broken().pointers()
    while faults:
        relay.books.enqueue(1)
        await pointers.publish_due(relay.outbox)
        await asyncio.sleep(0)
    all_are_begun.set()

    with pytest.raises(ZeroDivisionError):
        await pointers.wait_confirmed()
