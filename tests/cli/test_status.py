"""The output of `dispatcher status`, even while a server is unreachable."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import orjson
import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.cli.status import take_snapshot
from dispatcher.cli.status_page import table
from dispatcher.config import load
from dispatcher.domain.email_id import lowest_id_at
from dispatcher.domain.retry import longest_recovery_seconds
from dispatcher.store.old_transactions import OldTransaction
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine
from tests.store.pausing import pause
from tests.waiting import wait_until


@pytest.fixture
def prepared(prepared: CommandLine) -> CommandLine:
    return prepared.without_process


@pytest.fixture
def settled(settled: CommandLine) -> CommandLine:
    return settled.without_process


ONE = ("--from", "shop@example.com", "--to", "ann@example.org", "--subject", "Hi", "--text", "Thank you.")


def test_json_has_the_form_that_scripts_rely_on(prepared: CommandLine, topology: Topology) -> None:
    prepared("enqueue", "--key", "one", *ONE)

    ended = prepared("status", "--json")

    assert ended.code == 0
    assert ended.json["emails"] == {"pending": 1} | dict.fromkeys(
        ("waiting", "sending", "sent", "failed", "held", "cancelled"), 0
    )
    assert ended.json["queues"] == dict.fromkeys(topology.queues, 0)
    assert 0 < ended.json["oldest_pending_seconds"] < 60
    assert 0 < ended.json["longest_due_seconds"] < 60
    assert ended.json["providers"] == {}
    assert ended.json["old_transaction"] is None


def test_what_keeps_old_row_versions_is_named_with_a_remedy(settled: CommandLine) -> None:
    old = OldTransaction("session", "4711", "app", "psql", datetime(2026, 1, 2, tzinfo=UTC), 12_000)
    snapshot = replace(take_snapshot(load(settled.whole_environment)), old_transaction=old)

    (line,) = [line for line in table(snapshot, coloured=False) if "old row versions" in line]

    assert "because of the session 4711 (user app, application psql, open since 2026-01-02 00:00:00 UTC" in line
    assert "select pg_terminate_backend(4711)" in line
    assert snapshot.to_json()["old_transaction"]["name"] == "4711"


def test_undecided_emails_are_counted_in_the_week_before_they_lose_their_content(
    prepared: CommandLine, connection: psycopg.Connection
) -> None:
    prepared("enqueue", "--key", "one", *ONE)
    assert prepared("status", "--json").json["expiring"] == {"emails": 0, "first_in_seconds": None}
    old = lowest_id_at(datetime.now(UTC) - timedelta(days=178))
    connection.execute("update email_content set email_id = %s", [old])
    connection.execute(
        "update email_log set email_id = %s, status = 'held', created_at = now() - interval '178 days'", [old]
    )

    expiring = prepared("status", "--json").json["expiring"]

    assert expiring["emails"] == 1
    assert expiring["first_in_seconds"] == pytest.approx(2 * 86400, abs=600)
    assert "1 (first in 2.0 days)" in prepared("status").stdout


def test_a_faulty_provider_is_shown_with_the_worst_state_of_any_worker(
    prepared: CommandLine, connection: psycopg.Connection
) -> None:
    row = "insert into provider_state (provider, slot, state, reason, until_at, changed_at) values (%s, %s, %s, %s, {})"
    in_a_while = row.format("now() + %s * interval '1 second', now()")
    connection.execute(in_a_while, ["smtp", "a:w0", "paused", "throttled", 1000])
    connection.execute(in_a_while, ["smtp", "a:w1", "open", "connection_failed", 100])
    connection.execute(in_a_while, ["smtp", "b:w0", "open", "SMTP refuses [our] credentials.", 200])
    connection.execute(in_a_while, ["smtp", "b:w1", "closed", None, None])
    connection.execute(in_a_while, ["ses", "a:w0", "half_open", None, None])
    # The workers that wrote these rows have died. A running worker would have updated its row.
    connection.execute(in_a_while, ["sendgrid", "a:w0", "open", "old", -100])
    connection.execute(row.format("null, now() - interval '2 hours'"), ["sendgrid", "a:w1", "half_open", "old"])

    providers = prepared("status", "--json").json["providers"]
    table = prepared("status").stdout

    assert 0 < providers["smtp"].pop("seconds_left") <= 200
    assert providers == {
        "smtp": {"state": "open", "workers": 3, "reason": "SMTP refuses [our] credentials."},
        "ses": {"state": "half_open", "workers": 1, "reason": None, "seconds_left": None},
    }
    assert "open (3 workers, " in table
    assert "SMTP refuses [our] credentials." in table
    assert "half open (1 worker)" in table


def test_a_providers_long_reason_widens_no_column_and_no_line_ends_with_spaces(
    prepared: CommandLine, connection: psycopg.Connection
) -> None:
    before = prepared("status").stdout.splitlines()
    connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at) "
        "values ('smtp', 'a:w0', 'open', %s, now())",
        ["535 5.7.8 " + "Credentials are not accepted. " * 8],
    )

    lines = prepared("status").stdout.splitlines()

    assert lines[: len(before)] == before
    assert lines[-1].startswith("smtp: open (1 worker): 535 5.7.8 Credentials")
    assert [line for line in lines if line != line.rstrip()] == []


def test_status_shows_current_workers_and_recent_latency(prepared: CommandLine, connection: psycopg.Connection) -> None:
    prepared("enqueue", "--key", "one", *ONE)
    prepared("enqueue", "--key", "two", *ONE)
    sent = "update email_log set status = 'sent', sent_at = created_at + interval '250 ms' where message_key = 'one'"
    leased = (
        "update email_log set status = 'sending', locked_by = 'gone:w1:7:cafe', locked_until = now() + interval '20 s' "
        "where message_key = 'two'"
    )
    connection.execute(sent)
    connection.execute(leased)
    worker = "host-a:w0:4711:9f86d081"

    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"], application_name=worker):
        document = prepared("status", "--json").json
        table = prepared("status").stdout

    (vanished,) = document["vanished_hosts"]
    assert (vanished["name"], vanished["in_flight"]) == ("gone", 1)
    assert 0 < vanished["settled_in_seconds"] - longest_recovery_seconds(60) <= 20
    assert "gone vanished" in table
    assert ["workers", "1"] in [line.split() for line in table.splitlines()]
    # PostgreSQL notices late that a session has ended.
    wait_until(lambda: ["workers", "none"] in [line.split() for line in prepared("status").stdout.splitlines()])
    assert document["latency_seconds"] == {"p50": 0.25, "p95": 0.25, "p99": 0.25}
    dead, running = document["workers"]
    assert dead == {"name": "gone:w1:7:cafe", "age_seconds": None, "in_flight": 1}
    assert (running["name"], running["in_flight"]) == (worker, 0)
    assert 0 <= running["age_seconds"] < 60


def test_a_silent_host_has_vanished_even_without_leases(prepared: CommandLine, connection: psycopg.Connection) -> None:
    connection.execute(
        "insert into host_presence values ('well:1', 'well', now()), ('lost:1', 'lost', now() - interval '10 min')"
    )

    (vanished,) = prepared("status", "--json").json["vanished_hosts"]

    assert (vanished["name"], vanished["in_flight"], vanished["settled_in_seconds"]) == ("lost", 0, None)
    assert vanished["silent_seconds"] == pytest.approx(600, abs=60)
    assert ["lost", "vanished", "no", "report", "for", "10", "min"] in [
        line.split() for line in prepared("status").stdout.splitlines()
    ]


def test_pauses_are_shown_and_what_is_paused_has_no_age(prepared: CommandLine, connection: psycopg.Connection) -> None:
    prepared("enqueue", "--key", "one", *ONE)
    pause(connection, "tenant", "default")

    answer = prepared("status", "--json").json

    assert [(each["scope"], each["name"], each["until"]) for each in answer["pauses"]] == [("tenant", "default", None)]
    assert (answer["oldest_pending_seconds"], answer["longest_due_seconds"]) == (None, None)
    assert "Tenant default is paused by ann: maintenance." in prepared("status").stdout


def test_ages_are_null_if_no_email_is_pending(settled: CommandLine) -> None:
    answer = settled("status", "--json").json

    assert (answer["oldest_pending_seconds"], answer["longest_due_seconds"]) == (None, None)


def test_table_names_every_status_and_queue(prepared: CommandLine, topology: Topology) -> None:
    ended = prepared("status")

    first_words = [line.split()[0] for line in ended.stdout.splitlines() if line.strip()]
    assert first_words == [
        *("pending", "waiting", "sending", "sent", "failed", "held", "cancelled", "oldest", "oldest", "workers"),
        *topology.send_queues.values(),
        topology.dlq,
    ]


def test_an_age_ahead_of_the_clock_is_shown_as_such(prepared: CommandLine, connection: psycopg.Connection) -> None:
    prepared("enqueue", "--key", "one", *ONE)
    connection.execute("update email_log set created_at = clock_timestamp() + interval '3 hours'")

    assert "3.0 h ahead of PostgreSQL's clock" in prepared("status").stdout


@pytest.mark.parametrize(
    "missing", [{"DISPATCHER_AMQP_URL": "amqp://u:p@127.0.0.1:1/"}, {"DISPATCHER_QUEUE": "nowhere"}]
)
def test_without_queues_the_emails_are_still_counted(settled: CommandLine, missing: dict[str, str]) -> None:
    ended = settled.having(**missing)("status", "--json")

    assert ended.code == 3
    assert ended.json["queues"] is None
    assert ended.json["emails"]["pending"] == 0
    assert "RabbitMQ" in ended.stderr


def test_without_the_database_it_fails(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_DATABASE_URL="postgresql://u:p@127.0.0.1:1/x")("status", "--json")

    assert (ended.code, ended.stdout) == (1, "")


def test_watch_prints_a_line_per_refresh_until_the_reader_closes_the_pipe(settled: CommandLine) -> None:
    with settled.started("status", "--watch", "0.1", "--json") as process:
        assert process.stdout is not None
        looks = [orjson.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        code = process.wait(timeout=DEADLINE_SECONDS)
        assert process.stderr is not None
        words = process.stderr.read()
        process.stdout = None

    assert all(look["emails"]["sent"] == 0 for look in looks)
    assert (code, words) == (0, b"")


def test_ctrl_c_ends_watch_without_a_stack_trace(settled: CommandLine) -> None:
    with settled.started("status", "--watch", "--json", stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 130
    assert stderr.strip() == b""


def test_watch_goes_on_during_an_outage(settled: CommandLine) -> None:
    with settled.having(DISPATCHER_DATABASE_URL="postgresql://u:p@127.0.0.1:1/x").started(
        "status", "--watch", "0.1"
    ) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        process.terminate()

    assert all(line.startswith(b"PostgreSQL is not available") for line in lines)


def test_watch_redraws_the_terminal_and_restores_the_cursor(settled: CommandLine) -> None:
    import pty

    ours, theirs = pty.openpty()
    with settled.started("status", "--watch", "0.1", stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        screen = b""
        while screen.count(b"stop with Ctrl-C") < 3:
            screen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while read := os.read(ours, 65536):
                screen += read
        except OSError:  # Linux reports the closed terminal as an error
            os.close(ours)
        code = process.wait(timeout=DEADLINE_SECONDS)

    assert code == 130
    assert screen.count(b"\x1b[?25l") == screen.count(b"\x1b[?25h") == 1
    assert b"Traceback" not in screen


def test_the_history_has_hours_up_to_two_days_and_otherwise_days_by_provider_and_outcome(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    storing = storing.without_process
    empty = storing("status", "--history", "7d").stdout
    at = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
    for begins_at, provider, outcome, slot, count in (
        (at, "smtp", "accepted", "a", 1200),
        (at, "smtp", "accepted", "b", 34),
        (at, "smtp", "rejected", "a", 1),
        (at - timedelta(hours=2), "ses", "deferred", "a", 5),
        (at - timedelta(days=3), "ses", "accepted", "a", 7),
    ):
        row = [begins_at, provider, outcome, slot, count]
        connection.execute("insert into email_hourly values (%s, %s, %s, %s, %s)", row)

    days = storing("status", "--history", "7d").stdout
    hours = storing("status", "--history", "2d").stdout
    history = storing("status", "--history", "7d", "--json").json

    assert empty == "No attempt ended in this time.\n"
    lines = [line.split() for line in days.splitlines()]
    assert lines[0][:3] == ["day", "(UTC)", "provider"]
    assert [f"{at - timedelta(days=3):%Y-%m-%d}", "ses", "7", "0", "0", "0", "100.0", "%"] in lines
    assert [f"{at:%Y-%m-%d}", "ses", "0", "5", "0", "0", "0.0", "%"] in lines
    assert ["smtp", "1,234", "0", "1", "0", "99.9", "%"] in lines
    assert ["total", "ses", "7", "5", "0", "0", "58.3", "%"] in lines
    assert [f"{at:%Y-%m-%d}", "12:00", "smtp", "1,234", "0", "1", "0", "99.9", "%"] in map(
        str.split, hours.splitlines()
    )
    assert {"begins_at": f"{at:%Y-%m-%dT12:00:00Z}", "provider": "smtp", "outcome": "accepted", "attempts": 1234} in (
        history["hours"]
    )
    assert len(history["days"]) == 4


@pytest.mark.parametrize("given", [("--history", "0s"), ("--history", "401d"), ("--history", "7d", "--watch")])
def test_a_history_of_no_time_or_of_a_moment_that_is_watched_is_refused(
    storing: CommandLine, given: tuple[str, ...]
) -> None:
    assert storing.without_process("status", *given).code == 2
