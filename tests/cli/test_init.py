"""`dispatcher init`: what the command creates, how it fails, and that no application waits for long meanwhile."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import psycopg
import pytest

from dispatcher import Email, enqueue
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.cli.commandline import CommandLine, settings_for
from tests.waiting import wait_until

AWAY = "127.0.0.1:1"
ROOT = Path(__file__).parents[2]
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


def test_init_lists_its_changes_and_a_second_run_changes_nothing(
    unprepared: CommandLine, topology_names: Topology
) -> None:
    first, second, third = unprepared("init"), unprepared("init"), unprepared("init", "--json")
    different = unprepared.having(DISPATCHER_QUEUE_TYPE="classic")("init")

    assert (first.code, second.code) == (0, 0)
    lines = first.stdout.splitlines()
    assert "postgresql: applied migration 0001 baseline" in lines
    assert (
        len([line for line in lines if line.startswith("rabbitmq: ")]) == 5
    )  # the exchange, three send queues, the DLQ
    for name in topology_names.queues:
        assert f"rabbitmq: declared queue {name} (quorum, durable)" in lines
    assert second.stdout == "nothing to create: the tables are up to date, and the queues exist and are bound\n"
    assert first.stderr + second.stderr == ""
    assert third.json == {"changes": {"postgresql": [], "rabbitmq": []}, "plan": [], "faults": {}}
    assert different.code == 3
    assert topology_names.dlq in different.stderr
    assert "x-queue-type is 'quorum', we need 'classic'" in different.stderr


def test_one_unreachable_server_does_not_stop_the_preparation_of_the_other(unprepared: CommandLine) -> None:
    without_broker = unprepared.having(DISPATCHER_AMQP_URL=f"amqp://u:p@{AWAY}/")
    some = without_broker("init", "--json")
    none = without_broker.having(DISPATCHER_DATABASE_URL=f"postgresql://u:p@{AWAY}/x")("init")
    afterwards = unprepared("init")
    invalid = unprepared.having(DISPATCHER_AMQP_URL="amqp://u:p@mq/%2F?heartbeat=blue")("init")

    assert some.code == 3
    assert "applied migration 0001 baseline" in some.json["changes"]["postgresql"]
    assert some.stderr.splitlines()[-1].startswith("rabbitmq: RabbitMQ at 127.0.0.1:1 cannot be reached")
    assert "postgresql" not in afterwards.stdout
    assert (none.code, none.stdout) == (1, "")
    assert [line.partition(":")[0] for line in none.stderr.splitlines()] == ["postgresql", "rabbitmq"]
    assert (invalid.code, invalid.stderr.partition(" ")[0]) == (78, "DISPATCHER_AMQP_URL")


@contextmanager
def using(database_url: str, *statements: str) -> Iterator[psycopg.Connection]:
    """A transaction of an application, which stays open after these statements."""
    with psycopg.connect(database_url, application_name="nightly-report") as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection


OLD_TRANSACTION = ("set transaction isolation level repeatable read", "select 1")


@pytest.fixture
def database_url(own_database_url: str) -> str:
    return own_database_url


@pytest.fixture
def later_release(bare: CommandLine, servers: Servers, database_url: str, topology_names: Topology) -> CommandLine:
    """`dispatcher` of a later release, with the tables of this one."""
    program = (sys.executable, "-m", "tests.store.later_release")
    settings = settings_for(topology_names, servers, database_url)
    return replace(bare, program=program, needs_process=True).having(**settings, PYTHONPATH=str(ROOT))


@pytest.fixture
def watcher(connection: psycopg.Connection) -> psycopg.Connection:
    """A session that no `init` blocks."""
    return connection


def test_applications_enqueue_while_init_waits_for_a_report_and_init_names_it(
    later_release: CommandLine, database_url: str, watcher: psycopg.Connection
) -> None:
    with using(database_url, "select from dispatcher.email_log") as report:
        user, pid = report.info.user, report.info.backend_pid
        waits = []
        with later_release.started("init", "--tries", "2") as init:
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
        assert "Migration 0002 two_tables cannot lock " + words in stderr.decode()
        assert "Try 1 of 2" in stderr.decode()
        assert "Gave up after 2 tries." in stderr.decode()
    assert later_release("init").code == 0


def test_init_says_beforehand_how_many_rows_its_tables_have_and_an_open_reader_blocks_no_new_index(
    later_release: CommandLine, database_url: str, watcher: psycopg.Connection
) -> None:
    watcher.execute(INSERT_KEY)
    watcher.execute("analyze")

    with using(database_url, "select from dispatcher.suppression"):
        done = later_release("init", "--tries", "1", "--json")

    rows = "changes these tables (with about so many rows):"
    assert done.code == 0
    assert done.json["plan"] == [
        f"migration 0002 two_tables {rows} email_log (0), email_idempotency (1)",
        f"migration 0003 event_index {rows} email_event (0); builds email_event_later while others read and write",
        f"migration 0004 listing {rows} suppression (0); builds suppression_later while others read and write",
    ]
    assert [f"postgresql: {each}" for each in done.json["plan"]] == done.stderr.splitlines()
    assert "built index suppression_later" in done.json["changes"]["postgresql"]
    again = later_release("init", "--json").json
    assert (again["plan"], again["changes"]["postgresql"]) == ([], [])


def test_init_ends_no_transaction_that_locks_tables_in_another_order(
    later_release: CommandLine, database_url: str, watcher: psycopg.Connection
) -> None:
    with (
        using(database_url, "select from dispatcher.email_idempotency") as application,
        later_release.started("init") as init,
    ):
        # The migration locks `email_log` first, and then `email_idempotency`.
        waits = "select 1 from pg_locks where relation = 'dispatcher.email_idempotency'::regclass and not granted"
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
    later_release: CommandLine,
    database_url: str,
    watcher: psycopg.Connection,
    statement: str,
    is_waiting: Callable[[str, str], bool],
) -> None:
    with using(database_url, statement), later_release.started("init") as init:
        wait_until(lambda: any(is_waiting(*row) for row in watcher.execute(INIT_SESSIONS)))

        init.send_signal(signal.SIGKILL)

        wait_until(lambda: not watcher.execute(INIT_SESSIONS).fetchall())


def test_applications_write_while_an_index_waits_for_an_old_transaction_and_the_next_init_builds_it(
    later_release: CommandLine, database_url: str, watcher: psycopg.Connection
) -> None:
    built = "select indisvalid from pg_index where indexrelid::regclass::text ~ 'default_email_event_later'"
    with using(database_url, *OLD_TRANSACTION) as report:
        with later_release.started("init") as init:
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
    again = later_release("init", "--json")

    assert again.code == 0
    assert "built index email_event_later" in again.json["changes"]["postgresql"]
    assert watcher.execute(built).fetchone() == (True,)


def test_init_names_what_keeps_an_index_from_being_built(later_release: CommandLine, database_url: str) -> None:
    with using(database_url, *OLD_TRANSACTION) as report:
        pid = report.info.backend_pid
        blocked = later_release("init", "--tries", "1", "--json")

    migrations = ["applied migration 0002 two_tables", "applied migration 0003 event_index"]
    assert blocked.code == 75
    assert blocked.json["changes"]["postgresql"] == migrations
    fault = blocked.json["faults"]["postgresql"]
    assert f"is not built, because of the session {pid} " in fault
    assert f"select pg_terminate_backend({pid})" in fault


def test_migrations_before_a_locked_table_stay_applied_and_a_terminal_shows_the_rest(
    later_release: CommandLine, database_url: str
) -> None:
    with using(database_url, "lock table dispatcher.email_event in row share mode"):
        blocked = later_release("init", "--tries", "1", "--json")
    again = later_release.on_terminal("init")

    assert (blocked.code, again.code) == (75, 0)
    assert blocked.json["changes"]["postgresql"] == ["applied migration 0002 two_tables"]
    assert "cannot lock email_event" in blocked.json["faults"]["postgresql"]
    assert "postgresql: applying migration 0003 event_index" in again.stdout
    assert "0002" not in again.stdout
