"""The statements of workers and relays use an index, whatever the tables contained when PostgreSQL planned the
statements.

PostgreSQL keeps a plan, and the plan may be much older than the rows that it reads. PostgreSQL counts the rows that
index and table scans read. These counts show that a statement reads only the emails of a batch, and only the partitions
of their ids' weeks.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from dispatcher.actions.dlq import select
from dispatcher.domain.email_id import new_email_ids, time_of
from dispatcher.domain.event import EventKind, ProviderEvent
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import connect_async, make_pool
from dispatcher.store.events import EventRow, settle_proven, store_events
from dispatcher.store.failures import group_dead
from dispatcher.store.instants import EARLIEST, LATEST
from dispatcher.store.leases import DomainWait, Lease, LeaseStore
from dispatcher.store.outbox import DueRange, Outbox
from dispatcher.store.polling import find_held_message, find_polled
from dispatcher.store.queries import all_queries
from dispatcher.store.settlement import FoundLease
from tests.store.books import Books
from tests.store.results import result
from tests.waiting import until, wait_until

RUNS = 12
"""psycopg prepares a statement at its sixth execution. PostgreSQL plans it five more times, then may keep a plan."""
BATCH = 10
EMAILS = 2_500


def nothing(books: Books) -> None:
    pass


def found_empty(books: Books) -> None:
    books.connection.execute("vacuum analyze")


def found_small(books: Books) -> None:
    books.enqueue(100)
    books.connection.execute("vacuum analyze")


COPIED = ("email_log", "email_content", "email_idempotency", "email_recipient")


def enqueue(books: Books, count: int, **fields: Any) -> list[UUID]:
    """Enqueues an email, and copies its rows, which takes a tenth of the time of enqueueing `count` emails."""
    copied = books.enqueue_one(**fields)
    email_ids = new_email_ids(count)
    for table in COPIED:
        books.connection.execute(
            f"""
            insert into {table}
            select (jsonb_populate_record(e, jsonb_build_object('email_id', id, 'message_key', id))).*
            from {table} as e, unnest(%s) as id where email_id = %s
            """.encode(),  # noqa: S608 - our own names
            [email_ids, copied],
        )
        books.connection.execute(f"delete from {table} where email_id = %s".encode(), [copied])  # noqa: S608
    return email_ids


FOUND = (nothing, found_empty, found_small)


async def do_all(store: LeaseStore, keys: dict[UUID, str]) -> int:
    """Executes every worker statement that takes email ids; returns the number of sent emails."""
    ids = list(keys)
    leases = await store.lease(keys, 60)
    tokens = {lease.email_id: lease.token for lease in leases} or dict.fromkeys(ids, 1)
    await store.renew(tokens, 60)
    await store.release(tokens)
    wait = DomainWait("example.org", "normal", "acme", 1.0)
    await store.wait_for_domains({email_id: (token, wait) for email_id, token in tokens.items()})
    await store.find_unleased(ids)
    await store.find_paused(ids, ["acme"], ["bulk"])
    await store.put_back(ids, ["acme"], 2.0)
    await store.locked.find_locked(ids, is_busy=True)
    leases = await store.lease(keys, 60) or [Lease(email_id, None, 1, 1, None, None) for email_id in ids]
    results = [result(lease, Status.SENT) for lease in leases]
    recorded = await store.record(results)
    await store.record([each._replace(provider_code="250") for each in results])  # by the statement for all results
    await store.is_recorded(results[0])
    return len(recorded)


def rows_read(connection: psycopg.Connection) -> dict[str, int]:
    """The number of rows that all ended sessions have read since the statistics were reset, by index and table."""
    rows = connection.execute(
        "select indexrelname, idx_tup_read from pg_stat_user_indexes where idx_tup_read > 0 "
        "union all select relname, seq_tup_read from pg_stat_user_tables where seq_tup_read > 0"
    ).fetchall()
    return {str(name): int(number) for name, number in rows}


async def assert_reads_few_rows(
    database_url: str, work: Awaitable[int], end: Callable[[], Awaitable[object]], name: str = "planned"
) -> None:
    """Does the work for a batch on the session with this name. Fails if a statement scanned a whole index or table. Old
    row versions count, too: there are many while autovacuum analyzes the tables. A session reports its counters only
    when it ends, by `end`."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        books = Books(connection)
        wait_until(lambda: all(row["application_name"].startswith("planned") for row in books.other_sessions()))
        connection.execute("select pg_stat_reset()")
        assert await work == BATCH
        await end()
        wait_until(lambda: not books.sessions(name))
        read = rows_read(connection)
        assert 0 < max(read.values()) < EMAILS, read


async def do_all_relay_work(outbox: Outbox, due: dict[UUID, datetime]) -> int:
    """Executes the statements that a relay repeats; returns the number of marked emails. The search for lost messages
    is left out, because it reads all pending emails, but runs only every ten seconds."""
    await outbox.find_publish_due(BATCH)
    left = await outbox.mark_published(due)
    await outbox.find_dead_letter_due(BATCH)
    await outbox.mark_dead_lettered(due)
    await outbox.find_expiring()
    leases = [FoundLease(email_id, 1, "planned", due_at, True, 0) for email_id, due_at in due.items()]
    await outbox.recover_expired(OnUncertain.HOLD, 3, leases)
    await outbox.find_next_due()
    await outbox.find_next_wake()
    await outbox.wake(BATCH)
    await outbox.cancel_expired(BATCH)
    return len(due) - len(left)


@pytest.mark.parametrize(("prepare", "keeps_plans"), [*((each, True) for each in FOUND), (found_small, False)])
async def test_worker_and_relay_statements_planned_for_small_tables_scan_no_large_ones(
    database_url: str, keeps_plans: bool, prepare: Callable[[Books], None]
) -> None:
    """In sessions that keep their plans whatever the tables contained, and in other sessions."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        books = Books(connection)
        prepare(books)
        pool = make_pool(database_url, name="planned", size=1, keeps_plans=keeps_plans)
        await pool.open()
        store = LeaseStore(pool, worker="planned", slot="slot-1")
        session = await connect_async(database_url, name="planned relay", keeps_plans=keeps_plans)
        outbox = Outbox(session)
        for _ in range(RUNS):
            await do_all(store, dict.fromkeys(new_email_ids(BATCH), "unknown"))
            await do_all_relay_work(outbox, dict.fromkeys(new_email_ids(BATCH), datetime.now(UTC)))

        email_ids = enqueue(books, EMAILS)
        keys = books.keys(email_ids[:: EMAILS // BATCH])
        due = {each: books.row(each)["publish_due_at"] for each in email_ids[1 :: EMAILS // BATCH]}

    await assert_reads_few_rows(database_url, do_all(store, keys), pool.close)
    await assert_reads_few_rows(database_url, do_all_relay_work(outbox, due), session.close, "planned relay")


@pytest.mark.parametrize("prepare", FOUND)
async def test_event_and_polling_statements_planned_for_small_tables_scan_no_large_ones(
    database_url: str, prepare: Callable[[Books], None]
) -> None:
    hasher = AddressHasher(b"k" * 32)

    def reported(email_ids: list[UUID]) -> list[EventRow]:
        now = datetime.now(UTC)
        events = [ProviderEvent(email_id=i, provider="ses", kind=EventKind.OPENED, happened_at=now) for i in email_ids]
        return [EventRow.of(event, hasher) for event in events]

    async def poll(held_id: UUID) -> int:
        found = await find_polled(poller, "twilio", after=None, youngest_seconds=600.0, oldest_seconds=3600.0)
        await find_held_message(poller, held_id)
        return len(found)

    with psycopg.connect(database_url, autocommit=True) as connection:
        books = Books(connection)
        prepare(books)
        session = await connect_async(database_url, name="planned", keeps_plans=True)
        poller = await connect_async(database_url, name="planned poller", keeps_plans=True)
        outbox = Outbox(session)
        for _ in range(RUNS):
            await store_events(session, reported(new_email_ids(BATCH)), SuppressionRules())
            await settle_proven(session, new_email_ids(BATCH))
            await outbox.settle_proven(BATCH)
            await poll(new_email_ids(1)[0])

        email_ids = enqueue(books, EMAILS)
        books.lose_attempt(*email_ids)
        connection.execute(
            "insert into email_attempt (email_id, attempt_number, worker, provider, started_at, finished_at, outcome) "
            "select email_id, number, 'w', unnest(array['smtp', 'ses']), now(), now(), 'uncertain' "
            "from email_log, generate_series(1, 2) as number"
        )
        # In another session: a session may report the rows that it reads here only after the counters are reset.
        async with await connect_async(database_url, name="earlier") as earlier:
            await store_events(earlier, reported(email_ids[1::2]), SuppressionRules())
            while await Outbox(earlier).settle_proven(500):
                pass
        connection.execute("vacuum email_log")

    async def settle() -> int:
        await store_events(session, reported(email_ids[:: EMAILS // BATCH]), SuppressionRules())
        return len(await outbox.settle_proven(EMAILS))

    await assert_reads_few_rows(database_url, settle(), session.close)

    with psycopg.connect(database_url, autocommit=True) as connection:
        books = Books(connection)
        connection.execute("update email_log set status = 'sent', sent_at = now() - interval '20 minutes'")
        sms = "update email_log set channel = 'sms', provider = 'twilio', sent_at = %s where email_id = any(%s)"
        connection.execute(sms, [datetime.now(UTC) - timedelta(days=2), email_ids])
        connection.execute(sms, [datetime.now(UTC) - timedelta(minutes=20), email_ids[:BATCH]])
        held_id = books.enqueue_one(to="bob@example.org")
        books.change(held_id, channel="sms", status="held", settled_at=datetime.now(UTC), leased_at=datetime.now(UTC))
        connection.execute("vacuum email_log")

    await assert_reads_few_rows(database_url, poll(held_id), poller.close, "planned poller")


async def test_a_search_for_due_emails_of_small_tenants_does_not_read_those_of_a_large_one(
    database_url: str,
) -> None:
    tenants = [f"small-{number}" for number in range(BATCH)]
    with psycopg.connect(database_url, autocommit=True) as connection:
        books = Books(connection)
        enqueue(books, EMAILS, tenant_id="large")
        enqueue(books, EMAILS // 10, tenant_id="medium")
        connection.execute("vacuum analyze")  # PostgreSQL now expects every tenant to have many emails
        for tenant_id in tenants:
            books.enqueue(tenant_id=tenant_id)
        session = await connect_async(database_url, name="planned", keeps_plans=True)

    async def look() -> int:
        ranges = [DueRange(("normal", tenant_id), EARLIEST, LATEST, 10) for tenant_id in tenants]
        return len(await Outbox(session).find_due_of_tenants(ranges))

    for _ in range(RUNS):
        await look()

    await assert_reads_few_rows(database_url, look(), session.close)


async def test_the_newest_dead_emails_are_found_without_the_sent_ones_that_are_newer(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        email_ids = enqueue(Books(connection), 2 * EMAILS)
        statuses = "update email_log set status = case when email_id < %s then 'failed' else 'sent' end"
        connection.execute(statuses, [sorted(email_ids)[EMAILS // 2]])
        connection.execute("vacuum full analyze email_log")
    session = await connect_async(database_url, name="planned")

    async def look() -> int:
        return sum(each.emails for each in await group_dead(session, select(), "tenant", limit=BATCH, groups=1))

    await assert_reads_few_rows(database_url, look(), session.close)


@pytest.mark.parametrize("weeks", [8, 25])
async def test_all_sessions_can_lease_at_once_without_running_out_of_locks(database_url: str, weeks: int) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection, psycopg.connect(database_url) as other:
        books = Books(connection)
        connection.execute("select email_partitions_make(now() - %s * interval '1 week', %s)", [weeks, weeks])
        email_id = books.enqueue_one()
        pool = make_pool(database_url, name="planned", size=1, keeps_plans=True)
        await pool.open()
        store = LeaseStore(pool, worker="planned", slot="slot-1")
        for _ in range(RUNS):
            await store.lease({new_email_ids(1)[0]: "unknown"}, 60)

        Books(other).lock(email_id)
        lease = asyncio.create_task(store.lease(books.keys([email_id]), 60))
        await until(lambda: books.waiting_for_a_lock("planned"))
        (held,) = books.select(
            "select count(*) as locks, 2 * current_setting('max_locks_per_transaction')::integer as room from pg_locks "
            "where pid in (select pid from pg_stat_activity "
            "where application_name = 'planned' and datname = current_database())"
        )
        other.rollback()
        assert len(await lease) == 1
        await pool.close()

        assert held["locks"] <= held["room"]


LOCKING = re.compile(r"for (no key )?update|\b(update|delete from) dispatcher.email_(log|content|attachment)\b")
PARAMETER = re.compile(r"%\((\w+)\)[sbt]")
LOWEST, HIGHEST = UUID(int=0), UUID(int=2**128 - 1)


def plan_of(
    connection: psycopg.Connection, statement: str, lowest: UUID = LOWEST, highest: UUID = HIGHEST
) -> dict[str, Any]:
    """The plan of a statement about emails in all partitions, of which `lowest` and `highest` may leave out some."""
    names = list(dict.fromkeys(PARAMETER.findall(statement)))
    numbered = PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
    connection.execute(f"prepare explained as {numbered}".encode())
    (types,) = connection.execute(
        "select parameter_types::text[] from pg_prepared_statements where name = 'explained'"
    ).fetchone() or ([],)
    values = {"uuid[]": f"'{{{LOWEST},{HIGHEST}}}'", "lowest_id": f"'{lowest}'", "highest_id": f"'{highest}'"}
    given = ", ".join(values.get(type_, values.get(name, "null")) for name, type_ in zip(names, types, strict=True))
    execute = f"explain (format json) execute explained ({given})".replace("()", "")
    row = connection.execute(execute.encode()).fetchone()
    connection.execute("deallocate explained")
    assert row is not None
    return dict(row[0][0]["Plan"])


def prunes_partitions_at_run_time(plan: dict[str, Any], *, locks: bool = False) -> bool:
    """Whether the part of a plan that locks or changes rows finds an email by a value from another row."""
    locks = locks or plan["Node Type"] in {"LockRows", "ModifyTable"}
    below = plan.get("Plans", [])
    conditions = " ".join(str(each.get("Index Cond", "")) for each in below)
    is_found = plan["Node Type"] in {"Append", "Merge Append"} and re.search(
        r"email_id = (\w+\.|\(InitPlan)", conditions
    )
    return bool(locks and is_found) or any(prunes_partitions_at_run_time(each, locks=locks) for each in below)


def test_a_statement_that_changes_emails_prunes_no_partitions_at_run_time(connection: psycopg.Connection) -> None:
    """PostgreSQL 18 before commit 1b5dd3a crashes if another transaction has changed one of the statement's rows."""
    connection.execute("set plan_cache_mode = force_generic_plan")
    statements = {name: text.decode() for name, text in all_queries().items() if LOCKING.search(text.decode())}

    assert len(statements) > 10
    plans = {name: plan_of(connection, text) for name, text in statements.items()}
    assert [name for name, plan in plans.items() if prunes_partitions_at_run_time(plan)] == []


def test_a_statement_that_changes_given_emails_reads_only_the_partitions_of_their_weeks(
    connection: psycopg.Connection,
) -> None:
    connection.execute("set plan_cache_mode = force_custom_plan")
    given = {name: text.decode() for name, text in all_queries().items() if b"any(%(email_ids)s)" in text}
    statements = {name: text for name, text in given.items() if LOCKING.search(text)}
    first, last = new_email_ids(2)
    day = time_of(first).date()
    week = f"p{day - timedelta(days=day.weekday()):%Y%m%d}"

    assert len(statements) > 10
    plans = {name: str(plan_of(connection, text, first, last)) for name, text in statements.items()}
    read = {name: set(re.findall(r"email_[a-z]+_(p\d{8}|default)\b", plan)) for name, plan in plans.items()}
    assert [name for name in read if read[name] - {week}] == ["release_held"], "only an operator's statement reads more"
