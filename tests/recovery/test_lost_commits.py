"""If a promoted standby lacks the old primary's last commits, only emails that may have been sent are held."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs

from dispatcher.broker.topology import Topology
from dispatcher.cli.checks import CheckState, check_postgresql
from dispatcher.dev import postgres
from dispatcher.dev.processes import Processes
from dispatcher.dev.servers import Servers
from dispatcher.domain.status import Status
from dispatcher.store.connections import Pool, connect_async, connected, make_pool, session
from dispatcher.store.leases import LeaseStore
from dispatcher.store.migrations import migrate
from dispatcher.store.settlement import find_leases
from dispatcher.store.timeline import Timeline
from tests.broker.rabbit import Rabbit
from tests.relay.running import Start, settings_for
from tests.store.books import Books
from tests.store.damage import refused
from tests.store.results import result
from tests.waiting import until, until_answer, wait_until

LEASE_SECONDS = "1"
WORKER = "host:w0:17:cafe"
SMALL = {"shared_buffers": "64MB", "wal_retrieve_retry_interval": "500ms"}


def was_promoted(books: Books, *, was_synchronous: bool = False) -> datetime:
    """Makes the relay see a promotion at the current time; returns that time."""
    (row,) = books.select(
        "insert into relay_timeline (timeline, is_synchronous) values (0, %s) returning noted_at", was_synchronous
    )
    noted_at: datetime = row["noted_at"]
    return noted_at


@pytest.mark.parametrize(("policy", "status"), [("hold", "held"), ("resend", "pending")])
async def test_emails_that_lost_commits_may_have_sent_are_judged_by_policy_with_a_reason(
    start: Start,
    servers: Servers,
    tables_url: str,
    topology: Topology,
    books: Books,
    rabbit: Rabbit,
    policy: str,
    status: str,
) -> None:
    due, published = books.enqueue(2)
    books.change(published, publish_due_at=None, published_at=books.row(published)["created_at"])
    was_promoted(books)

    with capture_logs() as logs:
        more = {"LEASE_SECONDS": LEASE_SECONDS, "ON_UNCERTAIN": policy}
        settings = settings_for(servers.amqp_url, tables_url, topology, **more)
        await start(settings)
        messages = await rabbit.take_all(settings.dlq if policy == "hold" else settings.queue, 2)

    assert {message.pointer.email_id for message in messages} == {due, published}
    for email_id in (due, published):
        row = books.row(email_id)
        assert (row["status"], row["was_uncertain"], row["error_type"]) == (status, True, "outcome_unknown")
        assert "failed over" in row["last_error"]
    (told,) = [log for log in logs if log["event"] == "store.promoted"]
    assert (told["lossy"], told["leases"], told["messages"]) == (True, 0, 1)


async def test_an_email_released_for_later_may_have_been_sent_in_lost_commits(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit
) -> None:
    became_due, due_later = books.enqueue(2)
    ago = was_promoted(books) - timedelta(seconds=10)
    books.connection.execute("update relay_timeline set noted_at = %s", (ago,))
    for email_id, seconds in ((became_due, 5), (due_later, 100)):
        books.change(email_id, created_at=ago - timedelta(minutes=1), publish_due_at=ago + timedelta(seconds=seconds))

    await start(settings_for(servers.amqp_url, tables_url, topology, LEASE_SECONDS=LEASE_SECONDS))

    (letter,) = await rabbit.take_all(topology.dlq, 1)
    assert letter.pointer.email_id == became_due
    assert books.row(due_later)["publish_due_at"] is not None


async def test_a_waiting_email_whose_time_had_come_may_have_been_sent_in_lost_commits(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit
) -> None:
    woken, waits = books.enqueue(2)
    ago = was_promoted(books) - timedelta(seconds=10)
    books.connection.execute("update relay_timeline set noted_at = %s", (ago,))
    for email_id, seconds in ((woken, 5), (waits, 100)):
        books.change(
            email_id,
            status="waiting",
            created_at=ago - timedelta(minutes=1),
            publish_due_at=None,
            wait_until=ago + timedelta(seconds=seconds),
        )

    await start(settings_for(servers.amqp_url, tables_url, topology, LEASE_SECONDS=LEASE_SECONDS))

    (letter,) = await rabbit.take_all(topology.dlq, 1)
    assert letter.pointer.email_id == woken
    assert books.row(waits)["status"] == "waiting"


async def test_after_a_promotion_no_statement_changes_more_than_a_batch_of_emails(
    tables_url: str, books: Books
) -> None:
    books.enqueue(5)
    was_promoted(books)

    async with await connect_async(tables_url, name="relay") as session:
        promotion = await Timeline(session).follow(batch=2)

    assert promotion is not None
    assert promotion.message_count == 5
    assert not any(row["publish_due_at"] for row in books.rows())


async def test_the_record_is_written_again_only_after_a_transaction_has_written_something(
    tables_url: str, books: Books
) -> None:
    async with await connect_async(tables_url, name="relay") as session:
        timeline = Timeline(session)

        async def recorded_at() -> datetime:
            await timeline.follow()
            (row,) = books.select("select noted_at from relay_timeline")
            found: datetime = row["noted_at"]
            return found

        async def is_kept() -> bool:
            return await recorded_at() == await recorded_at()

        await until_answer(is_kept)
        before = await recorded_at()
        enqueued_at = books.row(books.enqueue_one())["created_at"]

        assert await recorded_at() > enqueued_at > before


async def test_an_email_enqueued_after_the_promotion_is_published_at_once(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit
) -> None:
    promoted_at = was_promoted(books)
    email_id = books.enqueue_one()
    assert books.row(email_id)["created_at"] > promoted_at

    await start(settings_for(servers.amqp_url, tables_url, topology))

    (message,) = await rabbit.take_all(topology.queue, 1)
    assert message.pointer.email_id == email_id


async def test_leases_from_before_the_promotion_are_recorded_by_their_workers_and_not_released_by_settlement(
    start: Start,
    servers: Servers,
    tables_url: str,
    topology: Topology,
    books: Books,
    rabbit: Rabbit,
    store: LeaseStore,
    pool: Pool,
) -> None:
    living, dead = books.enqueue(2)
    leases = {lease.email_id: lease for lease in await store.lease(books.keys([living, dead]), 1)}
    was_promoted(books)
    await start(settings_for(servers.amqp_url, tables_url, topology, LEASE_SECONDS=LEASE_SECONDS))
    await until(lambda: all("promotion" in row["locked_by"] for row in books.rows()))

    assert await store.renew({living: leases[living].token}, 60) == {living}
    assert await store.record([result(leases[living], Status.SENT)]) == {living}
    async with session(pool) as connection:
        assert await find_leases(connection, "worker-1") == []

    (letter,) = await rabbit.take_all(topology.dlq, 1)
    assert letter.pointer.email_id == dead
    assert "failed over" in books.row(dead)["last_error"]


async def test_the_promotion_of_a_synchronous_standby_leaves_nothing_in_doubt(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit, store: LeaseStore
) -> None:
    due, leased = books.enqueue(2)
    await store.lease(books.keys([leased]), 60)
    was_promoted(books, was_synchronous=True)

    with capture_logs() as logs:
        await start(settings_for(servers.amqp_url, tables_url, topology))
        (message,) = await rabbit.take_all(topology.queue, 1)

    assert message.pointer.email_id == due
    assert books.row(leased)["locked_by"] == "worker-1"
    (told,) = [log for log in logs if log["event"] == "store.promoted"]
    assert not told["lossy"]


class Pair:
    """A primary and an asynchronous standby."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.primary, _ = postgres.start(processes, print, SMALL, name="primary")
        with connected(self.primary.url) as connection:
            migrate(connection)
        self.standby, _ = postgres.start(processes, print, SMALL, name="standby", primary=self.primary)
        wait_until(lambda: self.standby_says("select status = 'streaming' from pg_stat_wal_receiver"))
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        login = f"{postgres.ROLE}:{self.primary.password}"
        self.url = f"postgresql://{login}@{hosts}/{postgres.DATABASE}?target_session_attrs=read-write"

    def standby_says(self, question: str) -> bool:
        """Runs a yes-or-no query on the standby."""
        with psycopg.connect(self.standby.url, autocommit=True) as session:
            row = session.execute(question.encode()).fetchone()
            return bool(row and row[0])

    def cut_off(self) -> None:
        """Cuts the standby off from further commits."""
        with psycopg.connect(self.standby.url, autocommit=True) as session:
            session.execute("alter system set primary_conninfo = ''")
            session.execute("select pg_reload_conf()")
        wait_until(lambda: self.standby_says("select count(*) = 0 from pg_stat_wal_receiver"))

    def promote(self) -> None:
        """Stops the primary, and promotes the standby."""
        plan = self._processes.folder / "plan" / "primary.json"
        pid = self._processes.running()["primary"]
        plan.unlink()
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: "primary" not in self._processes.running())
        with psycopg.connect(self.standby.url, autocommit=True) as session:
            session.execute("select pg_promote()")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Separate servers for this test."""
    with tempfile.TemporaryDirectory(prefix="dispatcher-pair-") as folder:
        processes = Processes(Path(folder) / "servers")
        processes.folder.mkdir(mode=0o700)
        processes.spawn_keeper(os.getpid())
        try:
            yield Pair(processes)
        finally:
            processes.stop()


@pytest.mark.slow
async def test_after_a_lossy_promotion_sent_emails_are_held_and_leased_or_queued_ones_are_sent(
    pair: Pair, start: Start, servers: Servers, topology: Topology, rabbit: Rabbit
) -> None:
    settings = settings_for(servers.amqp_url, pair.url, topology, LEASE_SECONDS="4")
    findings = await asyncio.to_thread(lambda: list(check_postgresql(settings)))
    (finding,) = [found for found in findings if found.subject == "PostgreSQL standbys"]
    assert finding.state is CheckState.WARNING
    await start(settings)
    with psycopg.connect(pair.primary.url, autocommit=True) as connection:
        books = Books(connection)
        finished, in_hand, queued = books.enqueue(3)
        await until(lambda: all(row["published_at"] for row in books.rows()))
        await until(lambda: pair.standby_says("select count(*) = 3 from email_log where publish_due_at is null"))
        pair.cut_off()
        async with opened(pair.url) as pool:
            store = LeaseStore(pool, worker=WORKER, slot="slot-1")
            leases = {lease.email_id: lease for lease in await store.lease(books.keys([finished, in_hand]), 60)}
            await store.record([result(leases[finished], Status.SENT)])
    messages = await rabbit.take_all(topology.queue, 3)  # workers acked two messages as finished; one is still queued

    pair.promote()

    async with opened(pair.url) as pool:
        store = LeaseStore(pool, worker=WORKER, slot="slot-1")
        assert await store.record([result(leases[in_hand], Status.SENT)]) == {in_hand}
        (message,) = [each for each in messages if each.pointer.email_id == queued]
        (lease,) = await store.lease({queued: message.pointer.message_key}, 60)
        assert await store.record([result(lease, Status.SENT)]) == {queued}
    with psycopg.connect(pair.standby.url, autocommit=True) as connection:
        books = Books(connection)
        await until(lambda: books.status(finished) == "held")
        assert books.statuses() == {"sent": 2, "held": 1}
        assert "failed over" in books.row(finished)["last_error"]


@asynccontextmanager
async def opened(database_url: str) -> AsyncIterator[Pool]:
    """Opens a worker's pool of database sessions during the block."""
    pool = make_pool(database_url, name=WORKER, size=1)
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


async def test_nothing_is_published_while_postgresql_refuses_to_mark_an_uncertain_lease(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit
) -> None:
    leased, _ = books.enqueue(2)
    books.change(leased, status="sending", locked_by=WORKER, locked_until="9999-01-01 00:00+00", publish_due_at=None)
    was_promoted(books)

    with refused(books.connection, leased, "new.locked_by <> old.locked_by"), capture_logs() as logs:
        await start(settings_for(servers.amqp_url, tables_url, topology))
        await until(lambda: sum(log["event"] == "store.connection_lost" for log in logs) > 1)

        assert await rabbit.take(topology.queue) is None
