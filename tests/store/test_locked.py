"""Statements find locked emails without waiting and leave them out. While no email is locked, they make no extra query.

A commit that waits for a synchronous standby keeps its rows locked. The dispatcher reports these rows as waiting for a
commit.
"""

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
    pool = make_pool(tables_url, name="worker-1", size=2, lock_seconds=0.1)
    await pool.open()
    yield LeaseStore(pool, worker="worker-1", slot="slot-1")
    await pool.close()


@contextmanager
def lock_holder(tables_url: str, *, locks: str, email_id: UUID) -> Iterator[None]:
    with psycopg.connect(tables_url, application_name="other-session") as connection:
        connection.execute(f"select from {locks} where email_id = %s for update".encode(), (email_id,))
        yield
        connection.rollback()


async def lease(store: LeaseStore, books: Books, email_ids: list[UUID]) -> tuple[set[UUID], set[UUID]]:
    """Leases all emails that are not locked; returns the leased emails, and the locked emails."""
    keys = books.keys(email_ids)
    outcome = await store.locked.execute_unlocked(keys, lambda free: store.lease({i: keys[i] for i in free}, 60))
    return {each.email_id for leases in outcome.answers for each in leases}, outcome.locked


@pytest.mark.parametrize("table", ["email_log", "email_idempotency"])
async def test_a_lock_on_the_row_or_on_its_keys_row_locks_an_email(
    store: LeaseStore, books: Books, tables_url: str, table: str
) -> None:
    held, free = books.enqueue(2)

    with lock_holder(tables_url, locks=table, email_id=held):
        assert await store.locked.find_locked([held, free, uuid4()], is_busy=True) == {held}

    assert await store.locked.find_locked([held, free]) == set()


async def test_a_locked_email_is_left_out_until_it_is_free(store: LeaseStore, books: Books, tables_url: str) -> None:
    held, *others = books.enqueue(3)
    later = books.enqueue(1)

    with lock_holder(tables_url, locks="email_log", email_id=held):
        first = await lease(store, books, [held, *others])
        second = await lease(store, books, [held, *later])
        alone = await lease(store, books, [held])
    after = await lease(store, books, [held])

    assert (first, second, alone) == ((set(others), {held}), (set(later), {held}), (set(), {held}))
    assert after == ({held}, set())
    assert len(store.locked) == 0


async def test_possible_lock_holders_are_logged_once_without_their_statements(
    store: LeaseStore, books: Books, tables_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = books.enqueue_one()

    with lock_holder(tables_url, locks="email_log", email_id=held):
        for _ in range(3):
            await store.locked.find_locked([held], is_busy=True)

    logged = capsys.readouterr().out
    assert logged.count("email.locked") == 1
    assert str(held) in logged
    # A transaction younger than the lock timeout is not reported.
    ages = [int(age) for age in re.findall(r"other-session.*?its transaction (\d+) s old", logged)]
    assert len(ages) == logged.count("other-session")
    assert all(age >= BATCH_LOCK_SECONDS for age in ages)
    assert "for update" not in logged


async def test_a_wait_for_a_lock_other_than_these_rows_still_raises(
    store: LeaseStore, books: Books, tables_url: str
) -> None:
    email_id = books.enqueue_one()

    with psycopg.connect(tables_url) as somebody_else:
        somebody_else.execute("lock table email_log in access exclusive mode")
        with pytest.raises(StoreBusy):
            await store.locked.execute_unlocked([email_id], lambda free: store.lease(dict.fromkeys(free, "key"), 60))
