"""Commits that make emails due notify the relay while there is little load. Under load, the relay polls."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest

from dispatcher.relay.notifications import BUSY_SAMPLES, POLL_SECONDS, QUIET_SECONDS, SAMPLES, Notifications
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import Outbox
from dispatcher.store.queries import all_queries
from tests.relay.running import Relay
from tests.store.books import Books
from tests.waiting import until

FOR_EVER = 3600.0
COMMIT_SECONDS = 0.025
MANY = 200
"""So many emails in one round of a test are a load."""
COMMITTING = 4
"""The applications that notify without pauses. PostgreSQL lets them commit one after the other."""


class Server(Outbox):
    """The leader's outbox, which listens. Its commits take COMMIT_SECONDS. `is_delayed`: one waits for another one."""

    is_delayed = False

    async def is_notifying_delayed(self) -> bool:
        return self.is_delayed


class Leader:
    """A relay that leads, on a clock that the test sets."""

    def __init__(self, outbox: Server, books: Books) -> None:
        self.outbox = outbox
        self.books = books
        self.now = 1000.0
        self.notifications = Notifications(outbox, clock=lambda: self.now)

    @property
    def are_on(self) -> bool:
        return self.notifications.are_on

    async def second(self, found: int = 0) -> None:
        """One second of the relay, in whose last round it finds so many emails."""
        self.notifications.note_round(found)
        await self.notifications.run_once()

    async def notified(self) -> None:
        """One second of the relay, in which a commit notifies it."""
        count = self.notifications.count
        self.books.connection.execute("select pg_notify('email_dispatcher_due', '')")
        assert await self.notifications.wait(10)
        assert self.notifications.count > count
        await self.notifications.run_once()

    async def until_busy(self) -> None:
        self.now += 1.0
        self.outbox.is_delayed = True
        while self.are_on:
            await self.notified()
        self.outbox.is_delayed = False
        assert polls(self.books)


@pytest.fixture
async def leading(tables_url: str, books: Books) -> AsyncIterator[Leader]:
    async with await connect_async(tables_url, name="relay") as session:
        outbox = Server(session)
        await outbox.listen()
        outbox.commit_seconds = COMMIT_SECONDS
        yield Leader(outbox, books)


def polls(books: Books) -> bool:
    return books.count("relay_polls") > 0


def set_polls(books: Books, rows: int) -> None:
    """Writes the table as no leader would leave it now."""
    books.connection.execute("delete from relay_polls")
    books.connection.execute("insert into relay_polls select from generate_series(1, %s)", [rows])


def received(listener: psycopg.Connection, books: Books) -> list[str]:
    """The payloads of the notifications that were sent until now."""
    books.connection.execute("select pg_notify('email_dispatcher_due', 'last')")
    payloads: list[str] = []
    while "last" not in payloads:
        payloads += [each.payload for each in listener.notifies(timeout=10, stop_after=1)]
    return payloads[:-1]


@contextmanager
def load(url: str) -> Iterator[None]:
    """During the block, applications notify the relay in transactions that take a tenth of a second to commit."""
    is_over = threading.Event()

    def commit() -> None:
        with psycopg.connect(url, autocommit=True) as session:
            session.execute("set synchronous_commit = on")
            session.execute("set commit_siblings = 0")
            session.execute("set commit_delay = 100000")
            while not is_over.is_set():
                session.execute("select pg_notify('email_dispatcher_due', ''), pg_logical_emit_message(true, '', '')")

    with ThreadPoolExecutor(COMMITTING) as threads:
        committing = [threads.submit(commit) for _ in range(COMMITTING)]
        try:
            yield
        finally:
            is_over.set()
    for each in committing:
        each.result()


async def test_under_load_emails_are_published_without_notifications_until_another_relay_leads(
    relay: Relay, tables_url: str
) -> None:
    await relay.start(quiet_seconds=FOR_EVER)
    await relay.leads()
    with load(tables_url):
        await until(lambda: polls(relay.books))

    with psycopg.connect(tables_url, autocommit=True) as listener:
        listener.execute("listen email_dispatcher_due")
        email_ids = [relay.books.enqueue_one() for _ in range(20)]

        assert sorted(await relay.take(20)) == sorted(email_ids)
        assert received(listener, relay.books) == []

    relay.books.terminate("dispatcher relay")
    email_id = relay.books.enqueue_one()  # no relay leads, and no notification is sent

    assert await relay.take(1) == [email_id]
    assert not polls(relay.books)


@pytest.mark.parametrize("rows", [1, 2])
async def test_a_new_leader_removes_stale_rows_and_later_ones_delay_an_email_only_until_the_next_poll(
    relay: Relay, rows: int
) -> None:
    set_polls(relay.books, rows)
    await relay.start()
    await until(lambda: not polls(relay.books))

    set_polls(relay.books, rows)
    email_id = relay.books.enqueue_one()

    assert await relay.take(1) == [email_id]


@pytest.mark.parametrize(
    ("are_delayed", "are_on"),
    [
        ([False] * SAMPLES, True),
        ([True] * (BUSY_SAMPLES - 1), True),
        ([True, False, True, False, True], False),
        ([True, True, False, False, False, True], True),  # the last SAMPLES count
    ],
)
async def test_notifications_are_off_if_commits_wait_for_each_other_in_most_seconds(
    leading: Leader, are_delayed: Sequence[bool], are_on: bool
) -> None:
    for leading.outbox.is_delayed in are_delayed:
        await leading.notified()

    assert (leading.are_on, polls(leading.books)) == (are_on, not are_on)


@pytest.mark.parametrize(
    ("steps", "are_on"),
    [
        # Each step: how many seconds pass, and how many emails are found in them.
        ([(QUIET_SECONDS, 0)], [True]),
        ([(2.0, 0), (2.0, MANY), (2.0, 0), (2.0, 0), (2.0, 0)], [False, False, False, False, True]),
        ([(2.0, 3), (2.0, 3), (2.0, 3)], [False, False, True]),
    ],
)
async def test_notifications_are_on_again_only_after_a_quiet_time(
    leading: Leader, steps: Sequence[tuple[float, int]], are_on: Sequence[bool]
) -> None:
    await leading.until_busy()
    seen = []
    for passed, found in steps:
        leading.now += passed
        await leading.second(found)
        seen.append(leading.are_on)

    assert seen == are_on
    assert polls(leading.books) is not are_on[-1]


@pytest.mark.parametrize(
    ("rounds", "waits_ms"),
    [
        ([1, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0], [0, 5, 10, 20, 40, 80, 160, 250, 250, 0, 5]),
        ([500, 500, 0], [0, 0, 5]),
    ],
)
async def test_the_relay_never_waits_longer_than_a_poll_and_polls_fast_while_emails_come(
    leading: Leader, rounds: Sequence[int], waits_ms: Sequence[int]
) -> None:
    assert leading.notifications.wait_seconds == POLL_SECONDS
    await leading.until_busy()
    waits = []
    for found in rounds:
        leading.notifications.note_round(found)
        waits.append(round(1000 * leading.notifications.wait_seconds))

    assert waits == waits_ms


def test_every_statement_that_notifies_finds_out_first_whether_the_relay_polls() -> None:
    notifying = [text for text in all_queries().values() if b"pg_notify" in text]

    assert len(notifying) == 6
    assert all(b"not exists (select from dispatcher.relay_polls)" in text for text in notifying)
