"""`dispatcher init` of a new release while applications and reports use the tables: no session waits for long."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import psycopg
import pytest

from dispatcher import Email, enqueue
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.cli.commandline import CommandLine, settings_for
from tests.store.old_tables import create_tables
from tests.waiting import wait_until

ENQUEUE_SECONDS = 3.0
"""The longest wait of an application while `init` tries to lock a table."""
EMAIL = Email(message_key="order-17", sender="a@example.com", to="b@example.org", subject="-", text="-")
INSERT_KEY = """
    insert into dispatcher.email_idempotency (tenant_id, message_key, email_id, payload_hash)
    values ('default', 'order-17', gen_random_uuid(), '')
"""
INIT_SESSIONS = """
    select wait_event_type, query from pg_stat_activity
    where datname = current_database() and application_name = 'dispatcher init'
"""


@contextmanager
def using(database_url: str, *statements: str) -> Iterator[psycopg.Connection]:
    """A transaction of an application, which stays open after these statements."""
    with psycopg.connect(database_url, application_name="nightly-report") as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection


@pytest.fixture
def old_release(
    bare: CommandLine,
    servers: Servers,
    empty_database_url: str,
    topology_names: Topology,
    request: pytest.FixtureRequest,
) -> CommandLine:
    """`dispatcher` with the tables of a release without the migrations from this number on; by default, from 48 on."""
    create_tables(empty_database_url, before=getattr(request, "param", 48))
    return bare.having(**settings_for(topology_names, servers, empty_database_url))


@pytest.fixture
def watcher(empty_database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize("old_release", [53], indirect=True)
def test_applications_enqueue_while_init_waits_for_a_report_and_init_names_it(
    old_release: CommandLine, empty_database_url: str, watcher: psycopg.Connection
) -> None:
    with using(empty_database_url, "select from dispatcher.email_log") as report:
        user, pid = report.info.user, report.info.backend_pid
        waits = []
        with old_release.started("init", "--tries", "2") as init:
            for number in count():
                began_at = time.monotonic()
                enqueue(watcher, replace(EMAIL, message_key=f"{number}"))
                waits.append(time.monotonic() - began_at)
                if init.poll() is not None:
                    break
            _, stderr = init.communicate()

        words = f"email_log, because of pid {pid} (user {user}, application nightly-report, transaction open since "
        assert max(waits) < ENQUEUE_SECONDS
        assert init.returncode == 75
        assert "Migration 0056 representable_values cannot lock " + words in stderr.decode()
        assert "Try 1 of 2" in stderr.decode()
        assert "Gave up after 2 tries." in stderr.decode()
    assert old_release("init").code == 0


@pytest.mark.parametrize("old_release", [26], indirect=True)
def test_init_ends_no_transaction_that_locks_tables_in_another_order(
    old_release: CommandLine, empty_database_url: str, watcher: psycopg.Connection
) -> None:
    with (
        using(empty_database_url, "select from dispatcher.api_key") as application,
        old_release.started("init") as init,
    ):
        # Migration 0026 locks `email_log` first, and then `api_key`.
        waits = "select 1 from pg_locks where relation = 'dispatcher.api_key'::regclass and not granted"
        wait_until(lambda: watcher.execute(waits).fetchone())
        began_at = time.monotonic()
        application.execute("lock table dispatcher.email_log in row exclusive mode")
        assert time.monotonic() - began_at < ENQUEUE_SECONDS
        application.commit()

        assert init.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("statement", "is_waiting"),
    [
        ("select from dispatcher.email_log", lambda wait, _: wait == "Lock"),
        (
            "select pg_advisory_lock(hashtext('dispatcher_migration'))",
            lambda _, statement: "pg_try_advisory_lock" in statement,
        ),
    ],
    ids=["table", "another init"],
)
def test_a_killed_init_leaves_no_session(
    old_release: CommandLine,
    empty_database_url: str,
    watcher: psycopg.Connection,
    statement: str,
    is_waiting: Callable[[str, str], bool],
) -> None:
    with using(empty_database_url, statement), old_release.started("init") as init:
        wait_until(lambda: any(is_waiting(*row) for row in watcher.execute(INIT_SESSIONS)))

        init.send_signal(signal.SIGKILL)

        wait_until(lambda: not watcher.execute(INIT_SESSIONS).fetchall())


@pytest.mark.parametrize("old_release", [51], indirect=True)
def test_applications_write_while_an_index_waits_for_an_old_transaction_and_the_next_init_builds_it(
    old_release: CommandLine, empty_database_url: str, watcher: psycopg.Connection
) -> None:
    built = "select indisvalid from pg_index where indexrelid::regclass::text ~ 'default_email_event_impossible'"
    with using(empty_database_url, "set transaction isolation level repeatable read", "select 1") as report:
        with old_release.started("init") as init:
            wait_until(lambda: watcher.execute(built).fetchone() == (False,))
            wait_until(lambda: any(wait == "Lock" for wait, _ in watcher.execute(INIT_SESSIONS)))
            began_at = time.monotonic()
            watcher.execute(INSERT_KEY)
            watcher.execute(
                "insert into dispatcher.email_event (email_id, event_key, provider, kind, happened_at) "
                "values (gen_random_uuid(), 'k', 'ses', 'opened', now())"
            )
            assert time.monotonic() - began_at < ENQUEUE_SECONDS

            init.send_signal(signal.SIGKILL)

            wait_until(lambda: not watcher.execute(INIT_SESSIONS).fetchall())
        assert watcher.execute(built).fetchone() == (False,)
        report.rollback()
    again = old_release("init", "--json")

    assert again.code == 0
    assert "built index email_event_impossible" in again.json["changes"]["postgresql"]
    assert watcher.execute(built).fetchone() == (True,)
    assert old_release("init", "--json").json["changes"]["postgresql"] == []


@pytest.mark.parametrize("old_release", [51], indirect=True)
def test_init_names_what_keeps_an_index_from_being_built(old_release: CommandLine, empty_database_url: str) -> None:
    with using(empty_database_url, "set transaction isolation level repeatable read", "select 1") as report:
        pid = report.info.backend_pid
        blocked = old_release("init", "--tries", "1", "--json")

    assert blocked.code == 75
    assert blocked.json["changes"]["postgresql"] == ["applied migration 0051 event_doubt"]
    fault = blocked.json["faults"]["postgresql"]
    assert f"is not built, because of the session {pid} " in fault
    assert f"select pg_terminate_backend({pid})" in fault


@pytest.mark.parametrize("old_release", [51], indirect=True)
def test_init_says_beforehand_how_many_rows_its_tables_have(
    old_release: CommandLine, empty_database_url: str, watcher: psycopg.Connection
) -> None:
    watcher.execute(INSERT_KEY)
    watcher.execute("analyze")

    done = old_release("init", "--json")

    plan = done.json["plan"]
    rows = "changes these tables (with about so many rows):"
    assert plan[0] == (
        f"migration 0051 event_doubt {rows} email_event (0); builds email_event_impossible while others read and write"
    )
    assert any(each.startswith(f"migration 0053 keys_in_bytes {rows} email_idempotency (1), ") for each in plan)
    assert [f"postgresql: {each}" for each in plan] == done.stderr.splitlines()
    assert old_release("init", "--json").json["plan"] == []


def test_migrations_before_a_locked_table_stay_applied(
    old_release: CommandLine, empty_database_url: str, watcher: psycopg.Connection
) -> None:
    with using(empty_database_url, "lock table dispatcher.domain_limit in row share mode"):
        blocked = old_release("init", "--tries", "1", "--json")
    again = old_release("init", "--json")

    assert (blocked.code, again.code) == (75, 0)
    assert blocked.json["changes"]["postgresql"] == [
        "applied migration 0048 recipient_outcomes",
        "applied migration 0049 provider_resumes",
    ]
    assert "cannot lock domain_limit" in blocked.json["faults"]["postgresql"]
    assert again.json["changes"]["postgresql"][0] == "applied migration 0050 domain_attempts"


@pytest.mark.parametrize("old_release", [37], indirect=True)
def test_an_open_reader_does_not_block_a_new_index(old_release: CommandLine, empty_database_url: str) -> None:
    with using(empty_database_url, "select from dispatcher.suppression"):
        changes = old_release("init", "--tries", "1", "--json").json["changes"]["postgresql"]

    assert "built index suppression_listed" in changes


def test_a_terminal_shows_each_migration_when_it_begins(old_release: CommandLine) -> None:
    shown = old_release.on_terminal("init").stdout

    assert "postgresql: applying migration 0048 recipient_outcomes" in shown
