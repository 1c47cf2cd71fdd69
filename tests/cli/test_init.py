"""`dispatcher init`: what it creates, how it fails, and that no application waits for long; and `dispatcher prune`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import psycopg
import pytest

from dispatcher import Email, enqueue
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from dispatcher.store.migrations import all_migrations
from dispatcher.store.retention import KINDS
from tests.cli.commandline import CommandLine, settings_for
from tests.waiting import wait_until

AWAY = "127.0.0.1:1"
OLD_WEEK = "select email_partitions_make(clock_timestamp() - interval '100 days', 0)"
ROOT = Path(__file__).parents[2]
NEXT = all_migrations()[-1].number + 1
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


def test_init_lists_its_changes_and_again_changes_nothing(unprepared: CommandLine, topology_names: Topology) -> None:
    first, second, third = unprepared("init"), unprepared("init"), unprepared("init", "--json")
    different = unprepared.having(DISPATCHER_QUEUE_TYPE="classic")("init")

    assert (first.code, second.code) == (0, 0)
    lines = first.stdout.splitlines()
    assert "postgresql: applied migration 0001 baseline" in lines
    queues = [line for line in lines if line.startswith("rabbitmq: ")]
    assert len(queues) == 5  # the exchange, three send queues, the DLQ
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
def using(release: CommandLine, *statements: str) -> Iterator[psycopg.Connection]:
    url = release.environment["DISPATCHER_DATABASE_URL"]
    with psycopg.connect(url, application_name="nightly-report") as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection


@pytest.fixture
def database_url(own_database_url: str) -> str:
    return own_database_url


@pytest.fixture
def release(bare: CommandLine, servers: Servers, database_url: str, topology_names: Topology) -> CommandLine:
    """`dispatcher` of a later release, with the tables of this one."""
    program = (sys.executable, "-m", "tests.store.later_release")
    settings = settings_for(topology_names, servers, database_url)
    return replace(bare, program=program, needs_process=True).having(**settings, PYTHONPATH=str(ROOT))


def test_applications_enqueue_while_init_waits_and_names_why(
    release: CommandLine, connection: psycopg.Connection
) -> None:
    with using(release, "select from dispatcher.email_log") as report:
        user, pid = report.info.user, report.info.backend_pid
        waits = []
        with release.started("init", "--tries", "2") as init:
            for number in count():
                began_at = time.monotonic()
                enqueue(connection, replace(EMAIL, message_key=f"{number}"))
                waits.append(time.monotonic() - began_at)
                with suppress(subprocess.TimeoutExpired):
                    init.wait(0.05)
                    break
            _, stderr = init.communicate()

        words = f"email_log, because of pid {pid} (user {user}, application nightly-report, transaction open since "
        assert max(waits) < ENQUEUE_SECONDS
        assert init.returncode == 75
        assert f"Migration {NEXT:04} two_tables cannot lock " + words in stderr.decode()
        assert "Try 1 of 2" in stderr.decode()
        assert "Gave up after 2 tries." in stderr.decode()


def test_init_says_how_many_rows_it_changes_and_waits_for_no_reader(
    release: CommandLine, connection: psycopg.Connection
) -> None:
    connection.execute(INSERT_KEY)
    connection.execute("analyze")

    with using(release, "select from dispatcher.suppression"):
        done = release("init", "--tries", "1", "--json")

    rows = "changes these tables (with about so many rows):"
    meanwhile = "while others read and write"
    assert done.code == 0
    assert done.json["plan"] == [
        f"migration {NEXT:04} two_tables {rows} email_log (0), email_idempotency (1)",
        f"migration {NEXT + 1:04} event_index {rows} email_event (0); builds email_event_later {meanwhile}",
        f"migration {NEXT + 2:04} listing {rows} suppression (0); builds suppression_later {meanwhile}",
    ]
    assert [f"postgresql: {each}" for each in done.json["plan"]] == done.stderr.splitlines()
    assert "built index suppression_later" in done.json["changes"]["postgresql"]


def test_init_ends_no_transaction_that_locks_in_another_order(
    release: CommandLine, connection: psycopg.Connection
) -> None:
    with using(release, "select from dispatcher.email_idempotency") as application, release.started("init") as init:
        # The migration locks `email_log` first, and then `email_idempotency`.
        waits = "select 1 from pg_locks where relation = 'dispatcher.email_idempotency'::regclass and not granted"
        wait_until(lambda: connection.execute(waits).fetchone())
        began_at = time.monotonic()
        application.execute("lock table dispatcher.email_log in row exclusive mode")
        assert time.monotonic() - began_at < ENQUEUE_SECONDS
        application.commit()

        assert init.wait(timeout=60) == 0


def test_applications_write_while_an_index_waits_for_a_transaction_which_init_names(
    release: CommandLine, connection: psycopg.Connection
) -> None:
    built = "select indisvalid from pg_index where indexrelid::regclass::text ~ 'default_email_event_later'"
    with using(release, "set transaction isolation level repeatable read", "select 1") as report:
        pid = report.info.backend_pid
        blocked = release("init", "--tries", "1", "--json")
        migrations = [f"applied migration {NEXT:04} two_tables", f"applied migration {NEXT + 1:04} event_index"]
        assert (blocked.code, blocked.json["changes"]["postgresql"]) == (75, migrations)
        fault = blocked.json["faults"]["postgresql"]
        assert f"is not built, because of the session {pid} " in fault
        assert f"select pg_terminate_backend({pid})" in fault

        with release.started("init") as init:
            wait_until(lambda: connection.execute(built).fetchone() == (False,))
            wait_until(lambda: any(wait == "Lock" for wait, _ in connection.execute(INIT_SESSIONS)))
            began_at = time.monotonic()
            connection.execute(INSERT_KEY)
            connection.execute(
                "insert into dispatcher.email_event (email_id, event_key, provider, kind, happened_at) "
                "values (gen_random_uuid(), 'k', 'ses', 'opened', now())"
            )
            assert time.monotonic() - began_at < ENQUEUE_SECONDS

            init.send_signal(signal.SIGKILL)

            wait_until(lambda: not connection.execute(INIT_SESSIONS).fetchall())
        assert connection.execute(built).fetchone() == (False,)
        report.rollback()
    again = release("init", "--json")

    assert again.code == 0
    assert "built index email_event_later" in again.json["changes"]["postgresql"]
    assert connection.execute(built).fetchone() == (True,)


def test_dry_run_names_what_prune_drops_or_cannot_drop(storing: CommandLine, connection: psycopg.Connection) -> None:
    names = {name for (name,) in connection.execute(OLD_WEEK) if "content" in name or "attachment" in name}
    (stuck,) = [name for name in names if "attachment" in name]
    connection.execute(f"create view report as table {stuck}".encode())

    would = storing("prune", "--dry-run", "--json").json["partitions"]
    some = storing("prune", "--json")
    connection.execute("drop view report")
    done = storing("prune", "--json").json

    assert set(would) == names
    assert (some.code, list(some.json["failed"])) == (3, ["email_attachment"])
    assert "email_attachment was not pruned: " in some.stderr
    assert (set(some.json["partitions"]), done["partitions"]) == (names - {stuck}, [stuck])
    assert {name: done[name] for name in KINDS} == dict.fromkeys(KINDS, 0)
    assert storing("prune", "--dry-run").stdout == "no partition is old enough\n"
