"""A named lock belongs to one session of the dispatcher's roles, and no other role can take it or keep it from them. A
session counts as one of our processes only if its role has our rights, because any session can have any name."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
import pytest

from dispatcher.errors import StoreUnavailable
from dispatcher.store.alerts import list_shared_host_names
from dispatcher.store.connections import AsyncSession, connect_async, connected
from dispatcher.store.emails import find_facts
from dispatcher.store.figures import list_workers
from dispatcher.store.grants import roles_of
from dispatcher.store.migrations import migrate
from dispatcher.store.named_locks import acquire, acquire_free, is_held_by_another, named_lock, release_named_lock
from dispatcher.store.outbox import Outbox
from dispatcher.store.settlement import terminate_sessions
from tests.store.books import Books, UrlOf
from tests.waiting import until, until_answer

DLQ = "dlq email.dispatcher.dlq"
OLD_LOCK = "pg_advisory_lock(hashtext('email_dispatcher_' || %s))"
"""How the release before took a named lock."""
LOCKS = """
    select pid from pg_locks
    where locktype = 'advisory' and pid <> pg_backend_pid()
        and database = (select oid from pg_database where datname = current_database())
"""
"""The advisory locks of this test's database."""


@pytest.fixture
def url_of(tables_url: str, books: Books) -> Iterator[UrlOf]:
    """Creates a role of a kind: `producer`, `dispatcher`, `reader`, or `stranger`, which has no right to the schema.
    Returns the URL with which the role connects."""
    created = []

    def create(kind: str) -> str:
        name = f"{kind}_{secrets.token_hex(4)}"
        books.connection.execute(f"create role {name} login password 'secret'".encode())
        created.append(name)
        for role in roles_of(producer=name, dispatcher=name, reader=name):
            for grant in role.grants if role.role == kind else ():
                books.connection.execute(grant.encode())
        parts = urlsplit(tables_url)
        return parts._replace(netloc=f"{name}:secret@{parts.hostname}:{parts.port}").geturl()

    yield create
    for name in created:
        books.connection.execute(
            b"select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = %s", [name]
        )
        books.connection.execute(f"drop owned by {name}".encode())
        books.connection.execute(f"drop role {name}".encode())


@pytest.fixture
async def other(tables_url: str) -> AsyncIterator[AsyncSession]:
    async with await connect_async(tables_url, name="second") as opened:
        yield opened


@contextmanager
def old_release(url: str, name: str, *, lock: str = OLD_LOCK) -> Iterator[None]:
    """A session with a named lock of the release before. So a stranger's session takes it, too."""
    with psycopg.connect(url, autocommit=True) as opened:
        opened.execute(f"select {lock}".encode(), [name])
        yield


async def test_a_session_has_a_named_lock_until_it_ends(session: AsyncSession, other: AsyncSession) -> None:
    assert await acquire(session, "relay")
    assert not await acquire(other, "relay")
    assert await is_held_by_another(other, "relay")
    assert not await is_held_by_another(session, "relay")

    await session.close()

    await until_answer(lambda: acquire(other, "relay"))


async def test_a_released_lock_is_free_and_has_no_row(session: AsyncSession, other: AsyncSession, books: Books) -> None:
    assert await acquire_free(session, ["relay", "relay_ready"]) == {"relay", "relay_ready"}
    assert await acquire_free(other, ["relay", "relay_ready", "webhooks"]) == {"webhooks"}

    await release_named_lock(session, "relay")

    assert await acquire_free(other, ["relay", "relay_ready"]) == {"relay"}
    await release_named_lock(other, "relay")
    await release_named_lock(session, "relay_ready")
    await release_named_lock(other, "webhooks")
    assert books.select("select name from named_lock") == []
    assert books.select(LOCKS) == []


async def test_a_frozen_session_loses_its_locks(other: AsyncSession, tables_url: str) -> None:
    frozen = await connect_async(tables_url, name="frozen", idle_seconds=0.2)
    assert await acquire(frozen, "relay")

    await until_answer(lambda: acquire(other, "relay"))

    with pytest.raises(StoreUnavailable):
        await is_held_by_another(frozen, "relay")
    await frozen.close()


@pytest.mark.parametrize("is_free_before", [True, False], ids=["free", "left by an ended session"])
async def test_of_two_sessions_that_take_a_lock_at_once_one_gets_it(
    session: AsyncSession, other: AsyncSession, books: Books, is_free_before: bool
) -> None:
    if not is_free_before:
        books.connection.execute("insert into named_lock (name, pid, key) values ('relay', 1, 1)")
    async with session.transaction():
        # As `take_named_locks`, but at a moment when the other session has already found that the lock is free.
        await session.execute(
            "insert into named_lock (name, pid, key) values ('relay', pg_backend_pid(), 4711) "
            "on conflict (name) do update set pid = excluded.pid, key = excluded.key"
        )
        second = asyncio.create_task(acquire(other, "relay"))
        await until(lambda: books.select("select from pg_locks where not granted and pid = %s", other.info.backend_pid))

        await session.execute("select pg_advisory_lock(pg_backend_pid(), 4711)")

    assert not await second
    assert await is_held_by_another(other, "relay")


async def test_a_row_does_not_count_if_its_pid_now_belongs_to_another_session(
    session: AsyncSession, other: AsyncSession, books: Books
) -> None:
    assert await acquire(other, "webhooks")
    books.connection.execute(
        "insert into named_lock (name, pid, key) values ('relay', %s, 4711)", [other.info.backend_pid]
    )

    assert await acquire(session, "relay")


async def test_strangers_keep_no_named_lock_from_us(session: AsyncSession, other: AsyncSession, url_of: UrlOf) -> None:
    with old_release(url_of("stranger"), "relay"):
        assert not await is_held_by_another(session, "relay")
        assert await acquire(session, "relay")
        assert not await acquire(other, "relay")
        await release_named_lock(session, "relay")
        async with named_lock(other, "relay") as is_ours:
            assert is_ours


async def test_of_the_roles_that_read_the_dlq_one_session_reads_at_a_time(
    session: AsyncSession, other: AsyncSession, url_of: UrlOf
) -> None:
    async with await connect_async(url_of("reader"), name="reader") as reader:
        async with (
            named_lock(reader, DLQ, for_readers=True) as is_readers,
            named_lock(session, DLQ, for_readers=True) as is_ours,
        ):
            assert (is_readers, is_ours) == (True, False)
        with old_release(url_of("stranger"), DLQ):
            for each in (session, reader):
                async with named_lock(each, DLQ, for_readers=True) as is_ours:
                    assert is_ours


async def test_a_stranger_cannot_prevent_partitions(session: AsyncSession, url_of: UrlOf, books: Books) -> None:
    books.connection.execute("select email_partitions_make(clock_timestamp(), 4)")
    last = books.select("select max(relname) as name from pg_class where relname ~ '^email_event_p[0-9]+$'")[0]["name"]
    books.connection.execute(f"drop table {last}".encode())

    with old_release(url_of("stranger"), "email_partitions_make", lock="pg_advisory_lock(hashtext(%s))"):
        assert await Outbox(session).make_partitions() == [last]


def test_a_stranger_cannot_delay_init(tables_url: str, url_of: UrlOf) -> None:
    with (
        old_release(url_of("stranger"), "dispatcher_migration", lock="pg_advisory_lock(hashtext(%s))"),
        connected(tables_url) as connection,
    ):
        assert migrate(connection) == []


WORKER = "host-a:w0:4711:9f86d081"


async def test_the_sessions_of_a_dead_worker_are_terminated_and_those_of_strangers_do_not_delay_recovery(
    url_of: UrlOf, books: Books
) -> None:
    ours = url_of("dispatcher")
    worker = psycopg.connect(ours, autocommit=True, application_name=WORKER)
    with psycopg.connect(url_of("stranger"), autocommit=True, application_name=WORKER) as stranger:
        async with await connect_async(ours, name="relay") as relay:
            assert await terminate_sessions(relay, WORKER) == 1
            await until(lambda: len(books.sessions(WORKER)) == 1)
            assert await terminate_sessions(relay, WORKER) == 0
        assert stranger.execute("select 1").fetchone() == (1,)
    worker.close()


async def test_strangers_sessions_are_neither_workers_nor_hosts(tables_url: str, url_of: UrlOf, books: Books) -> None:
    email_id = books.enqueue_one()
    url = url_of("stranger")
    with (
        psycopg.connect(url, application_name=WORKER),
        psycopg.connect(url, application_name="dispatcher alerts twin"),
        psycopg.connect(url, application_name="dispatcher alerts twin"),
        psycopg.connect(tables_url) as connection,
    ):
        async with await connect_async(tables_url, name="operator") as session:
            facts = await find_facts(session, email_id)
        assert facts is not None
        assert facts.workers == 0
        assert await asyncio.to_thread(list_workers.sync, connection) == []
        assert await asyncio.to_thread(list_shared_host_names.sync, connection) == []
