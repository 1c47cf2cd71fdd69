"""Commits that make emails due notify the relay while there is little load. Under load, the relay polls."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest

from dispatcher.config import Settings
from dispatcher.relay.notifications import QUIET_SECONDS, Notifications
from dispatcher.relay.publish_loop import POLL_SECONDS
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import Outbox
from dispatcher.store.queries import all_queries
from tests.broker.rabbit import Rabbit
from tests.relay.running import Start, leader
from tests.store.books import Books
from tests.waiting import until

FOR_EVER = 3600.0
COMMIT_SECONDS = 0.025
MANY = 200
"""So many emails in one round of a test are a load."""


@pytest.fixture
async def outbox(tables_url: str) -> AsyncIterator[Outbox]:
    """The leader's outbox, which listens."""
    async with await connect_async(tables_url, name="relay") as session:
        outbox = Outbox(session)
        await outbox.listen()
        yield outbox


def notify(books: Books, count: int) -> None:
    """As `count` transactions that notify the relay."""
    books.connection.execute(
        "select pg_notify('email_dispatcher_due', n::text) from generate_series(1, %s) as n", [count]
    )


def set_on(books: Books, *, is_on: bool) -> None:
    books.connection.execute("update due_notification set is_on = %s", [is_on])


def are_on(books: Books) -> bool:
    return bool(books.select("select is_on from due_notification")[0]["is_on"])


def received(listener: psycopg.Connection, books: Books) -> list[str]:
    """The payloads of the notifications that were sent until now."""
    books.connection.execute("select pg_notify('email_dispatcher_due', 'last')")
    payloads: list[str] = []
    while "last" not in payloads:
        payloads += [each.payload for each in listener.notifies(timeout=10, stop_after=1)]
    return payloads[:-1]


def is_off_under_load(books: Books) -> bool:
    """Adds load, thousands of notifications per second if called again and again. Returns whether the relay polls."""
    notify(books, MANY)
    return not are_on(books)


async def busy(outbox: Outbox, books: Books, *, quiet_seconds: float) -> Notifications:
    """Notifications that are off, because there was load."""
    notifications = Notifications(outbox, poll_seconds=POLL_SECONDS, quiet_seconds=quiet_seconds)
    await notifications.switch_on()
    outbox.commit_seconds = COMMIT_SECONDS
    while notifications.are_on:
        notify(books, MANY)
        assert await notifications.wait(10)
        await notifications.run_once()
    assert not are_on(books)
    return notifications


async def test_under_load_emails_are_published_without_notifications(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, tables_url: str
) -> None:
    await start(settings, quiet_seconds=FOR_EVER)
    await until(lambda: leader(books))
    await until(lambda: is_off_under_load(books))

    with psycopg.connect(tables_url, autocommit=True) as listener:
        listener.execute("listen email_dispatcher_due")
        email_ids = [books.enqueue_one() for _ in range(20)]
        messages = await rabbit.take_all(settings.queue, 20)

        assert sorted(message.pointer.email_id for message in messages) == sorted(email_ids)
        assert received(listener, books) == []


async def test_after_a_load_commits_notify_again(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    await start(settings, quiet_seconds=0.0)
    await until(lambda: leader(books))
    await until(lambda: is_off_under_load(books))
    await until(lambda: are_on(books))

    books.enqueue_one()
    await rabbit.take_all(settings.queue, 1)


async def test_a_new_leader_wants_notifications(start: Start, settings: Settings, books: Books) -> None:
    set_on(books, is_on=False)

    await start(settings)

    await until(lambda: are_on(books))


async def test_an_email_that_was_enqueued_without_a_notification_is_found_by_the_next_poll(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    await start(settings)
    await until(lambda: leader(books))
    await until(lambda: are_on(books))
    set_on(books, is_on=False)  # as an old snapshot shows it
    email_id = books.enqueue_one()

    (message,) = await rabbit.take_all(settings.queue, 1)

    assert message.pointer.email_id == email_id


@pytest.mark.parametrize(
    ("notified", "commit_seconds", "is_on"),
    [
        (0, COMMIT_SECONDS, True),
        (MANY, COMMIT_SECONDS, False),
        (MANY, 0.0, True),  # no commit was measured yet
    ],
)
async def test_notifications_are_off_if_commits_would_wait_for_each_other(
    outbox: Outbox, books: Books, notified: int, commit_seconds: float, is_on: bool
) -> None:
    notify(books, notified)
    notifications = Notifications(outbox, poll_seconds=POLL_SECONDS)
    outbox.commit_seconds = commit_seconds
    assert await notifications.wait(10 if notified else 0) == bool(notified)

    await notifications.run_once()

    assert (notifications.are_on, are_on(books)) == (is_on, is_on)


@pytest.mark.parametrize(
    ("found", "has_backlog", "quiet_seconds", "is_on"),
    [
        (0, False, 0.0, True),
        (0, False, QUIET_SECONDS, False),  # the load ended only just now
        (MANY, False, 0.001, False),
        (0, True, 0.001, False),  # a full queue leaves the emails out, however fast they come
    ],
)
async def test_notifications_are_on_again_only_after_a_quiet_time(
    outbox: Outbox, books: Books, found: int, has_backlog: bool, quiet_seconds: float, is_on: bool
) -> None:
    notifications = await busy(outbox, books, quiet_seconds=quiet_seconds)
    notifications.note_round(found, has_backlog=has_backlog)

    await notifications.run_once()

    assert (notifications.are_on, are_on(books)) == (is_on, is_on)


async def test_without_notifications_each_empty_round_doubles_the_wait_for_the_next(
    outbox: Outbox, books: Books
) -> None:
    notifications = await busy(outbox, books, quiet_seconds=FOR_EVER)
    waits = []
    for found in (1, 0, 0, 0, 0, 0, 0, 0, 3, 0):
        notifications.note_round(found, has_backlog=False)
        waits.append(round(1000 * notifications.poll_seconds))

    assert waits == [5, 10, 20, 40, 80, 160, 250, 250, 5, 10]


async def test_a_session_measures_its_own_durable_commits(outbox: Outbox) -> None:
    assert outbox.commit_seconds == 0.0

    await outbox.follow_timeline()

    assert 0.0 < outbox.commit_seconds < 10.0


@pytest.mark.parametrize("is_on", [True, False])
def test_a_commit_notifies_the_relay_only_if_the_relay_wants_it(books: Books, tables_url: str, is_on: bool) -> None:
    set_on(books, is_on=is_on)
    with psycopg.connect(tables_url, autocommit=True) as listener:
        listener.execute("listen email_dispatcher_due")

        books.enqueue_one()

        assert received(listener, books) == [""] * is_on


def test_every_statement_that_notifies_reads_whether_the_relay_wants_it() -> None:
    notifying = [text for text in all_queries().values() if b"pg_notify" in text]

    assert len(notifying) == 5
    assert all(b"(select is_on from dispatcher.due_notification)" in text for text in notifying)
