"""Fixtures with a migrated database that is emptied between tests, which is a hundred times faster than a new clone.

These fixtures are for tests that only add rows. Tests that change the schema use `database_url` instead. The
conftest.py of each folder imports the fixtures that its tests need.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import psycopg
import pytest

from dispatcher.dev.servers import AMQP_URL, DATABASE_URL, MANAGEMENT_URL, Servers, private_servers
from dispatcher.store.connections import AsyncSession, Pool, connect_async, make_pool
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.store.books import Books
from tests.store.steered_clock import SEARCH_PATH, SteeredClock
from tests.waiting import wait_until

DATABASE_ID: Final = UUID("0d150a7c-0000-4000-8000-0000000000db")
"""The database's id, for ledgers that tests write."""
EMPTY: Final = """
    do $$
    declare
        filled regclass;
    begin
        perform set_config('dispatcher.prune_audit', 'on', true);
        for filled in
            select oid from pg_class
            where relkind in ('r', 'p') and not relispartition and relnamespace = 'dispatcher'::regnamespace
                and relname not in ('dispatcher_migration', 'dispatcher_database', 'outgoing_feed')
        loop
            execute format('delete from %s', filled);
        end loop;
        perform setval(seqrelid::regclass, seqstart, false) from pg_sequence
            where seqrelid in (select oid from pg_class where relnamespace = 'dispatcher'::regnamespace);
        update dispatcher.outgoing_feed set is_on = false, wanted_at = 'epoch';
    end $$
"""
"""Empties every table, and restarts every sequence, in one round trip."""
_DROP_LATER_WEEKS: Final = """
    do $$
    declare
        later regclass;
    begin
        for later in
            select inhrelid from pg_inherits join pg_class on pg_class.oid = inhrelid
            where relnamespace = 'dispatcher'::regnamespace and relkind = 'r'
                and substring(relname from '_p(\\d{8})$') > to_char(now() + interval '1 week', 'YYYYMMDD')
        loop
            execute format('drop table %s', later);
        end loop;
    end $$
"""
"""Drops the partitions after the next week: each partition costs every session a catalog look-up and planning."""
_OTHERS: Final = """
    from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
        and application_name <> 'test session'
"""
_RESET: Final = """
    set session authorization default;
    reset all;
    close all;
    unlisten *;
    select pg_advisory_unlock_all();
    discard temp;
    discard sequences
"""
"""Like `discard all`, but keeps the plans."""


@pytest.fixture(scope="session")
def kept_database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """One migrated database for the whole run."""
    name = f"kept_{secrets.token_hex(6)}"
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(f"create database {name} template {template_database}".encode())
        # The tests' own writes need not wait for the disk. The dispatcher's sessions still wait, as a separate test
        # asserts.
        administration.execute(f"alter database {name} set synchronous_commit = off".encode())
        url = urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{name}"))
        with psycopg.connect(url) as connection:
            connection.execute("update dispatcher_database set database_id = %s", [DATABASE_ID])
            connection.execute(_DROP_LATER_WEEKS.encode())
        yield url
        administration.execute(f"drop database {name} with (force)".encode())


class KeptSession:
    """One session for all tests of the run, reset after each test. In a new session, PostgreSQL reads its catalogs and
    plans each statement again, which takes longer than most tests' own statements."""

    def __init__(self, database_url: str, name: str) -> None:
        self._database_url = database_url
        self._name = name
        self._session: psycopg.Connection | None = None

    def open(self) -> psycopg.Connection:
        """The session, in autocommit. If a test ended the session, opens a new session."""
        if self._session is not None:
            with suppress(psycopg.OperationalError):
                self._session.execute("select")
                return self._session
            self._session.close()
        self._session = psycopg.connect(self._database_url, autocommit=True, application_name=self._name)
        return self._session

    def reset(self) -> None:
        """Ends the test's transaction, and releases its locks, settings, listeners and temporary tables."""
        if self._session is None:
            return
        with suppress(psycopg.OperationalError):
            self._session.rollback()
            self._session.autocommit = True
            self._session.execute(_RESET, prepare=False)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


@pytest.fixture(scope="session")
def cleaner(kept_database_url: str) -> Iterator[KeptSession]:
    with closing(KeptSession(kept_database_url, "test cleaner")) as opened:
        yield opened


@pytest.fixture(scope="session")
def kept_session(kept_database_url: str) -> Iterator[KeptSession]:
    with closing(KeptSession(kept_database_url, "test session")) as opened:
        yield opened


@pytest.fixture
def tables_url(kept_database_url: str, cleaner: KeptSession) -> Iterator[str]:
    """A migrated, empty database without sessions of other tests."""
    cleaner.open().execute(EMPTY.encode())
    yield kept_database_url
    # Otherwise, the next test would find the locks and names of these sessions.
    session = cleaner.open()
    session.execute(f"select pg_terminate_backend(pid) {_OTHERS}".encode())
    wait_until(lambda: session.execute(f"select {_OTHERS}".encode()).fetchone() is None)


@pytest.fixture(scope="session")
def disturbed(servers: Servers) -> Iterator[Servers]:
    """A PostgreSQL server for tests that stop it, or make commits wait. RabbitMQ is shared with other tests."""
    with tempfile.TemporaryDirectory(prefix="dispatcher-own-") as folder, pytest.MonkeyPatch.context() as environment:
        environment.delenv(DATABASE_URL, raising=False)
        environment.setenv(AMQP_URL, servers.amqp_url)
        environment.setenv(MANAGEMENT_URL, servers.management_url)
        with private_servers(Path(folder) / "servers", progress=print) as running:
            environment.undo()
            yield running


@pytest.fixture
def clock(tables_url: str) -> Iterator[SteeredClock]:
    """A settable PostgreSQL clock for sessions of `tables_url` that begin later. A test must list this fixture before
    fixtures that open sessions."""
    name = urlsplit(tables_url).path.removeprefix("/")
    with psycopg.connect(tables_url, autocommit=True) as administration:
        clock = SteeredClock(tables_url)
        administration.execute(f"alter database {name} set search_path = {SEARCH_PATH}".encode())
        yield clock
        administration.execute(f"alter database {name} reset search_path".encode())


@pytest.fixture
def tables_session(
    tables_url: str, kept_session: KeptSession, request: pytest.FixtureRequest
) -> Iterator[psycopg.Connection]:
    """A session of `tables_url`, in autocommit. A new session if the test steers the clock, because only sessions that
    begin later use that clock."""
    if "clock" in request.fixturenames:
        with psycopg.connect(tables_url, autocommit=True) as opened:
            yield opened
    else:
        yield kept_session.open()
        kept_session.reset()


@pytest.fixture
def books(tables_session: psycopg.Connection) -> Books:
    return Books(tables_session)


@pytest.fixture
async def session(tables_url: str) -> AsyncIterator[AsyncSession]:
    async with await connect_async(tables_url, name="session") as opened:
        yield opened


@pytest.fixture
def outbox(session: AsyncSession) -> Outbox:
    return Outbox(session)


@pytest.fixture
async def pool(tables_url: str) -> AsyncIterator[Pool]:
    async with make_pool(tables_url, name="worker-1", size=2, keeps_plans=True) as opened:
        yield opened


@pytest.fixture
def store(pool: Pool) -> LeaseStore:
    return LeaseStore(pool, worker="worker-1", slot="slot-1")


@pytest.fixture
def other_store(pool: Pool) -> LeaseStore:
    return LeaseStore(pool, worker="worker-2", slot="slot-2")
