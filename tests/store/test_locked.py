"""What is locked by somebody is found without a wait, and left out; nothing is asked while nothing is locked."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.errors import StoreBusy
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from dispatcher.store.leases import LeaseStore
from tests.store.books import Books


@pytest.fixture
async def store(tables_url: str) -> AsyncIterator[LeaseStore]:
    """A worker's statements, which wait for no lock for long."""
    pool = make_pool(tables_url, name="worker-1", size=2, lock_seconds=0.1)
    await pool.open()
    yield LeaseStore(pool, worker="worker-1", slot="slot-1")
    await pool.close()


@contextmanager
def somebody(tables_url: str, *, locks: str, email_id: UUID) -> Iterator[None]:
    """Has an open transaction that holds the email's row in that table."""
    with psycopg.connect(tables_url, application_name="somebody") as connection:
        connection.execute(f"select from {locks} where email_id = %s for update".encode(), (email_id,))
        yield
        connection.rollback()


async def lease(store: LeaseStore, books: Books, email_ids: list[UUID]) -> tuple[set[UUID], set[UUID]]:
    """What was leased, and what is locked."""
    keys = books.keys(email_ids)
    around = await store.locked.around(keys, lambda free: store.lease({i: keys[i] for i in free}, 60))
    return {each.email_id for leases in around.answers for each in leases}, around.locked


@pytest.mark.parametrize("table", ["email_log", "email_idempotency"])
async def test_an_email_is_locked_by_its_row_or_its_keys(
    store: LeaseStore, books: Books, tables_url: str, table: str
) -> None:
    held, free = books.enqueue(2)

    with somebody(tables_url, locks=table, email_id=held):
        assert await store.locked.among([held, free, uuid4()], is_busy=True) == {held}

    assert await store.locked.among([held, free]) == set()


async def test_a_batch_is_executed_without_what_is_locked_and_for_that_when_the_lock_is_gone(
    store: LeaseStore, books: Books, tables_url: str
) -> None:
    held, *others = books.enqueue(3)
    later = books.enqueue(1)

    with somebody(tables_url, locks="email_log", email_id=held):
        first = await lease(store, books, [held, *others])
        second = await lease(store, books, [held, *later])
        alone = await lease(store, books, [held])
    after = await lease(store, books, [held])

    assert (first, second, alone) == ((set(others), {held}), (set(later), {held}), (set(), {held}))
    assert after == ({held}, set())
    assert len(store.locked) == 0


async def test_who_may_hold_it_is_told_once_without_a_word_of_what_they_do(
    store: LeaseStore, books: Books, tables_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = books.enqueue_one()

    with somebody(tables_url, locks="email_log", email_id=held):
        for _ in range(3):
            await store.locked.among([held], is_busy=True)

    told = capsys.readouterr().out
    assert told.count("email.locked") == 1
    assert str(held) in told
    # Nobody is named whose transaction is younger than our patience.
    ages = [int(age) for age in re.findall(r"somebody.*?its transaction (\d+) s old", told)]
    assert len(ages) == told.count("somebody")
    assert all(age >= BATCH_LOCK_SECONDS for age in ages)
    assert "for update" not in told


async def test_a_wait_for_something_else_than_these_rows_is_still_a_fault(
    store: LeaseStore, books: Books, tables_url: str
) -> None:
    email_id = books.enqueue_one()

    with psycopg.connect(tables_url) as somebody_else:
        somebody_else.execute("lock table email_log in access exclusive mode")
        with pytest.raises(StoreBusy):
            await store.locked.around([email_id], lambda free: store.lease(dict.fromkeys(free, "key"), 60))
