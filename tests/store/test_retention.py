"""Pruning deletes content first, then emails by whole weeks, and then keys. It never deletes unfinished emails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from dispatcher.domain.email_id import lowest_id_at
from dispatcher.errors import DispatcherError, StatementRefused, StoreBusy
from dispatcher.store.connections import NO_TIMEOUT_ANSWER_SECONDS, TimedSession, connect_async
from dispatcher.store.retention import FailedStep, PrunedStep, Pruner, Retention, count_expiring
from tests.store.books import Books


def week_of(at: datetime) -> str:
    return f"p{(at - timedelta(days=at.weekday())).date():%Y%m%d}"


NOW = datetime.now(UTC)
OLD = NOW - timedelta(days=100)
OLD_WEEK = week_of(OLD)
FOR_EVER = Retention(0, 0, 0)
SHORT = Retention(30, 60, 0, undecided_days=90)
"""An undecided email from 100 days ago is past its limit; an undecided email from 80 days ago is not."""

UNDECIDED = ("failed", "held")

Prune = Callable[[Retention], Awaitable[list[PrunedStep | FailedStep]]]


@pytest.fixture
def books(connection: psycopg.Connection) -> Books:
    """A separate database, because the tests drop partitions."""
    return Books(connection)


@pytest.fixture
async def prune(database_url: str) -> AsyncIterator[Prune]:
    async with await connect_async(database_url, name="test") as session:

        async def prune(retention: Retention) -> list[PrunedStep | FailedStep]:
            return [step async for step in Pruner(session, retention).prune()]

        yield prune


def enqueue_long_ago(books: Books, status: str, *, at: datetime = OLD, number: int = 0, partition: bool = True) -> UUID:
    """Enqueues an email and moves it to the time `at`. Without `partition`, the email is in the default partition."""
    if partition:
        books.connection.execute("select email_partitions_make(%s, 0)", [at])
    new = books.enqueue_one()
    old = UUID(int=lowest_id_at(at).int + number)
    for table in ("email_log", "email_content", "email_idempotency"):
        moved = sql.SQL("update {} set email_id = %s where email_id = %s").format(sql.Identifier(table))
        books.connection.execute(moved, [old, new])
    books.connection.execute("update email_log set status = %s, created_at = %s where email_id = %s", [status, at, old])
    books.connection.execute("update email_idempotency set created_at = %s where email_id = %s", [at, old])
    return old


def dropped(steps: list[PrunedStep | FailedStep]) -> list[str]:
    return [step.name for step in steps if isinstance(step, PrunedStep) and step.name]


def failed(steps: list[PrunedStep | FailedStep]) -> dict[str, type[DispatcherError]]:
    return {step.what: type(step.fault) for step in steps if isinstance(step, FailedStep)}


def kept(books: Books, *email_ids: UUID) -> list[str]:
    tables = ("email_log", "email_content", "email_idempotency")
    ids = {table: {row["email_id"] for row in books.select(f"select email_id from {table}")} for table in tables}  # noqa: S608
    return [" ".join(table[6:] for table in tables if email_id in ids[table]) for email_id in email_ids]


ALL, NO_CONTENT, ONLY_KEY = "log content idempotency", "log idempotency", "idempotency"


def discard(books: Books, email_id: UUID) -> None:
    books.connection.execute("update email_log set dead_letter_discarded_at = now() where email_id = %s", [email_id])


async def test_a_week_of_finished_and_decided_emails_loses_its_content_then_its_emails_and_then_its_keys(
    books: Books, prune: Prune
) -> None:
    statuses = ("sent", "failed", "held", "cancelled")
    email_ids = [enqueue_long_ago(books, status, number=number) for number, status in enumerate(statuses)]
    for email_id in email_ids:
        discard(books, email_id)
    recent = books.enqueue_one()

    steps = await prune(Retention(30, 0, 0))
    assert dropped(steps) == [f"email_attachment_{OLD_WEEK}", f"email_content_{OLD_WEEK}"]
    assert kept(books, *email_ids, recent) == [NO_CONTENT] * 4 + [ALL]

    assert dropped(await prune(Retention(30, 60, 0)))[-1] == f"email_log_{OLD_WEEK}"
    assert kept(books, *email_ids, recent) == [ONLY_KEY] * 4 + [ALL]

    assert await prune(Retention(30, 60, 90)) == [PrunedStep("key", 4)]
    assert kept(books, *email_ids, recent) == [""] * 4 + [ALL]


async def test_retention_counts_from_the_time_of_a_scheduled_email(books: Books, prune: Prune) -> None:
    sent, failed, cancelled = (
        enqueue_long_ago(books, status, number=number) for number, status in enumerate(["sent", "failed", "cancelled"])
    )
    books.connection.execute("update email_log set due_since = now() - interval '1 day'")
    other = enqueue_long_ago(books, "sent", number=9)

    assert await prune(Retention(30, 60, 90, undecided_days=30)) == [PrunedStep("content", 1)]
    assert kept(books, sent, failed, cancelled, other) == [ALL, ALL, ALL, NO_CONTENT]


async def test_the_content_of_a_waiting_email_is_never_deleted(books: Books, prune: Prune) -> None:
    waiting = enqueue_long_ago(books, "pending", partition=False)
    until = NOW + timedelta(weeks=9)
    books.change(waiting, status="waiting", wait_until=until, due_since=until, publish_due_at=None)

    assert await prune(Retention(1, 1, 1, undecided_days=1)) == []
    assert kept(books, waiting) == [ALL]


@pytest.mark.parametrize(
    ("status", "undecided_days"), [("pending", 30), ("sending", 30), ("failed", 0), ("held", 0)], ids=str
)
async def test_a_week_with_an_unfinished_or_undecided_email_stays_and_the_others_lose_content(
    books: Books, prune: Prune, status: str, undecided_days: int
) -> None:
    unfinished = enqueue_long_ago(books, status)
    finished = enqueue_long_ago(books, status if undecided_days == 0 else "sent", number=1)
    if undecided_days == 0:
        discard(books, finished)

    steps = await prune(Retention(30, 60, 90, undecided_days=undecided_days))

    assert steps == [PrunedStep("content", 1)]
    assert kept(books, unfinished, finished) == [ALL, NO_CONTENT]


@pytest.mark.parametrize("partition", [True, False])
async def test_an_undecided_email_is_deleted_after_its_limit(books: Books, prune: Prune, partition: bool) -> None:
    expired, waiting = (
        [enqueue_long_ago(books, status, at=at, number=i, partition=partition) for i, status in enumerate(UNDECIDED)]
        for at in (OLD, NOW - timedelta(days=80))
    )

    await prune(SHORT)

    assert kept(books, *expired, *waiting) == [ONLY_KEY if partition else NO_CONTENT] * 2 + [ALL] * 2


async def test_undecided_emails_are_counted_a_week_before_they_lose_content(books: Books, database_url: str) -> None:
    for days in (89, 84, 82, 10):
        enqueue_long_ago(books, "held", at=NOW - timedelta(days=days))
    discard(books, enqueue_long_ago(books, "held", at=NOW - timedelta(days=88)))
    forgotten = enqueue_long_ago(books, "failed", at=NOW - timedelta(days=95))
    books.connection.execute("delete from email_content where email_id = %s", [forgotten])

    async with await connect_async(database_url, name="test") as session:
        expiring = await count_expiring(session, **SHORT.expiring)

    assert not FOR_EVER.expiring
    assert expiring is not None
    assert expiring.first_in_seconds is not None
    assert expiring.emails == 2
    assert 0 < expiring.first_in_seconds <= 86400  # the module computed NOW at import


DAYS = next(days for days in range(60, 67) if (NOW - timedelta(days=days)).weekday() == 3)
"""The number of days since a Thursday. Emails from before that day are old enough, but their week ended later."""
EARLIER_THAT_WEEK = NOW - timedelta(days=DAYS + 2)


async def test_content_is_kept_until_its_week_has_ended(books: Books, prune: Prune) -> None:
    email_id = enqueue_long_ago(books, "sent", at=EARLIER_THAT_WEEK)

    assert await prune(Retention(DAYS, 0, 0)) == []
    assert kept(books, email_id) == [ALL]

    week = week_of(EARLIER_THAT_WEEK)
    assert dropped(await prune(Retention(DAYS - 7, 0, 0))) == [f"email_attachment_{week}", f"email_content_{week}"]


async def test_content_in_the_default_partition_does_not_wait_for_its_week(books: Books, prune: Prune) -> None:
    sent = enqueue_long_ago(books, "sent", at=EARLIER_THAT_WEEK, partition=False)
    younger = enqueue_long_ago(books, "sent", at=EARLIER_THAT_WEEK + timedelta(days=3), partition=False)

    assert await prune(Retention(DAYS, 0, 0)) == [PrunedStep("content", 1)]

    assert kept(books, sent, younger) == [NO_CONTENT, ALL]


async def test_checking_a_week_may_take_longer_than_the_statement_timeout(database_url: str) -> None:
    async with await connect_async(database_url, name="pruning") as session:
        assert isinstance(session, TimedSession)

        assert [step async for step in Pruner(session, SHORT).prune()] == []

        answer = await (await session.execute("show statement_timeout")).fetchone()
        assert (answer, session.answer_seconds) == (("0",), NO_TIMEOUT_ANSWER_SECONDS)


REPLAY = [PrunedStep("replayed", 1), PrunedStep("replay", 1), PrunedStep("act", 1)]
"""What is pruned of the replay of `replay_long_ago`."""


async def test_a_partition_that_cannot_be_dropped_delays_only_its_own_rows(books: Books, prune: Prune) -> None:
    replay_long_ago(books)
    enqueue_long_ago(books, "sent")
    books.connection.execute(f"create view report as table email_attachment_{OLD_WEEK}".encode())

    steps = await prune(Retention(30, 60, 90, 90))

    assert failed(steps) == {"email_attachment": StatementRefused}
    assert dropped(steps) == [f"email_{name}_{OLD_WEEK}" for name in ("content", "attempt", "event", "recipient")]
    assert [step for step in steps if isinstance(step, PrunedStep) and not step.name] == REPLAY
    books.connection.execute("drop view report")
    assert dropped(await prune(Retention(30, 60, 90, 90))) == [f"email_attachment_{OLD_WEEK}", f"email_log_{OLD_WEEK}"]


@pytest.mark.parametrize("status", ["sent", "cancelled"])
async def test_unless_configured_only_content_with_erase_after_sending_is_deleted_once_it_is_sent_or_cancelled(
    books: Books, prune: Prune, status: str
) -> None:
    old = enqueue_long_ago(books, "sent")
    marks: list[dict[str, Any]] = [{"erase_after_sending": True}, {"tags": ["login", "one_time_code"]}]
    waiting, finished = ([books.enqueue_one(**mark) for mark in marks] for _ in range(2))
    receipt = books.enqueue_one(tags=["receipt"])
    ended = [*finished, receipt]
    books.connection.execute("update email_log set status = %s where email_id = any(%s)", [status, ended])

    assert await prune(FOR_EVER) == [PrunedStep("erased_after_sending", 2)]
    assert kept(books, *finished, *waiting, receipt, old) == [NO_CONTENT, NO_CONTENT, ALL, ALL, ALL, ALL]
    assert await prune(FOR_EVER) == []


async def test_an_email_that_is_being_released_keeps_its_content(books: Books, prune: Prune, database_url: str) -> None:
    email_id = enqueue_long_ago(books, "held")
    discard(books, email_id)
    # As in `held release`, one statement reads the content and makes the email pending.
    release = """
        update email_log set status = 'pending'
        where email_id = %s and exists (select from email_content where email_id = %s)
    """
    with psycopg.connect(database_url) as person:
        person.execute(release, [email_id, email_id])

        assert failed(await prune(Retention(30, 60, 90))) == {"email_attachment": StoreBusy}
        person.commit()

    assert await prune(Retention(30, 60, 90)) == []
    assert kept(books, email_id) == [ALL]


async def test_an_email_from_a_producer_with_a_slow_clock_is_not_old(books: Books, prune: Prune) -> None:
    email_id = enqueue_long_ago(books, "failed")
    books.connection.execute("update email_log set created_at = now() where email_id = %s", [email_id])

    assert await prune(Retention(30, 60, 90)) == []
    assert kept(books, email_id) == [ALL]


def replay_long_ago(books: Books) -> int:
    """Inserts a replay from 100 days ago, with one email and an audit record."""
    made = "insert into email_replay (source, selection, include_held, actor, reason, created_at) "
    (row,) = books.select(f"{made} values ('filter', '{{}}', false, 'ann', 'why', %s) returning replay_id", OLD)
    replay_id = int(row["replay_id"])
    books.connection.execute(
        "insert into email_replay_item values (%s, gen_random_uuid(), 'replayed', %s)", [replay_id, OLD]
    )
    act = "insert into operator_audit (acted_at, actor, action, replay_id) values (%s, 'ann', 'replay', %s)"
    books.connection.execute(act, [OLD, replay_id])
    return replay_id


async def test_an_old_replay_is_deleted_and_its_audit_record_only_if_configured(books: Books, prune: Prune) -> None:
    replay_long_ago(books)
    books.connection.execute("insert into operator_audit (actor, action) values ('ann', 'stop')")

    assert await prune(Retention(30, 60, 0)) == [PrunedStep("replayed", 1), PrunedStep("replay", 1)]

    assert (books.count("email_replay"), books.count("email_replay_item")) == (0, 0)
    assert books.count("operator_audit") == 2
    assert await prune(Retention(0, 0, 0, 90)) == [PrunedStep("act", 1)]

    assert [row["action"] for row in books.select("select action from operator_audit")] == ["stop"]
    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        books.connection.execute("delete from operator_audit")
