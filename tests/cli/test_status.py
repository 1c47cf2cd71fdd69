"""The output of `dispatcher status`, even while a server is unreachable."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime, timedelta

import orjson
import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.cli.status import fetch_unready
from dispatcher.config.values import Listener
from dispatcher.domain.email_id import lowest_id_at
from dispatcher.domain.retry import longest_recovery_seconds
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine
from tests.providers.listeners import listening
from tests.store.books import Books
from tests.store.pausing import pause
from tests.waiting import wait_until

AWAY = "postgresql://u:p@127.0.0.1:1/x"


def words_of(commandline: CommandLine) -> list[list[str]]:
    return [line.split() for line in commandline("status").stdout.splitlines() if line.strip()]


def test_json_and_table_have_every_status_and_queue(prepared: CommandLine, tables: Books, topology: Topology) -> None:
    before = prepared("status", "--json").json
    tables.enqueue_one()

    ended = prepared("status", "--json")

    assert ended.code == 0
    others = dict.fromkeys(("waiting", "sending", "sent", "failed", "held", "cancelled"), 0)
    assert ended.json["emails"] == {"pending": 1, **others}
    assert ended.json["queues"] == dict.fromkeys(topology.queues, 0)
    assert 0 < ended.json["oldest_pending_seconds"] < 60
    assert 0 < ended.json["longest_due_seconds"] < 60
    assert (ended.json["providers"], ended.json["old_transaction"]) == ({}, None)
    assert (before["oldest_pending_seconds"], before["longest_due_seconds"]) == (None, None)
    assert [line[0] for line in words_of(prepared)] == [
        *("pending", "waiting", "sending", "sent", "failed", "held", "cancelled", "oldest", "oldest", "workers"),
        *topology.send_queues.values(),
        topology.dlq,
    ]
    tables.connection.execute("update email_log set created_at = clock_timestamp() + interval '3 hours'")
    assert "3.0 h ahead of PostgreSQL's clock" in prepared("status").stdout


def test_undecided_emails_are_counted_in_the_week_before_they_expire(prepared: CommandLine, tables: Books) -> None:
    tables.enqueue_one()
    assert prepared("status", "--json").json["expiring"] == {"emails": 0, "first_in_seconds": None}
    old = lowest_id_at(datetime.now(UTC) - timedelta(days=178))
    tables.connection.execute("update email_content set email_id = %s", [old])
    tables.connection.execute(
        "update email_log set email_id = %s, status = 'held', created_at = now() - interval '178 days'", [old]
    )

    expiring = prepared("status", "--json").json["expiring"]

    assert expiring == {"emails": 1, "first_in_seconds": pytest.approx(2 * 86400, abs=600)}
    assert "1 (first in 2.0 days)" in prepared("status").stdout


def test_a_provider_has_the_worst_state_of_any_worker(prepared: CommandLine, connection: psycopg.Connection) -> None:
    long = "SMTP refuses [our] credentials. " * 8
    for provider, slot, state, reason, seconds, ago in (
        ("smtp", "a:w0", "paused", "throttled", 1000, 0),
        ("smtp", "a:w1", "open", "connection_failed", 100, 0),
        ("smtp", "b:w0", "open", long, 200, 0),
        ("smtp", "b:w1", "closed", None, None, 0),
        ("ses", "a:w0", "half_open", None, None, 0),
        # The workers that wrote these rows have died. A running worker would have updated its row.
        ("sendgrid", "a:w0", "open", "old", -100, 0),
        ("sendgrid", "a:w1", "half_open", "old", None, 7200),
    ):
        connection.execute(
            "insert into provider_state (provider, slot, state, reason, until_at, changed_at) values"
            " (%s, %s, %s, %s, now() + %s * interval '1 second', now() - %s * interval '1 second')",
            [provider, slot, state, reason, seconds, ago],
        )

    providers = prepared("status", "--json").json["providers"]
    shown = prepared("status").stdout

    assert 0 < providers["smtp"].pop("seconds_left") <= 200
    assert providers == {
        "smtp": {"state": "open", "workers": 3, "reason": long},
        "ses": {"state": "half_open", "workers": 1, "reason": None, "seconds_left": None},
    }
    for words in ("smtp: open (3 workers, ", "[our] credentials.", "`dispatcher resume provider smtp`", "half open"):
        assert words in shown


def test_current_workers_vanished_hosts_and_recent_latency_are_shown(prepared: CommandLine, tables: Books) -> None:
    one, two = tables.enqueue(2)
    execute = tables.connection.execute
    execute("update email_log set sent_at = created_at + interval '250 ms' where email_id = %s", [one])
    execute("update email_log set locked_until = now() + interval '20 s' where email_id = %s", [two])
    tables.change(one, status="sent")
    tables.change(two, status="sending", locked_by="gone:w1:7:cafe")
    execute("insert into host_presence values ('well:1', 'well', now()), ('lost:1', 'lost', now() - interval '10 min')")
    worker = "host-a:w0:4711:9f86d081"

    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"], application_name=worker):
        document = prepared("status", "--json").json
        lines = words_of(prepared)

    lost, gone = sorted(document["vanished_hosts"], key=lambda each: each["in_flight"])
    assert (gone["name"], gone["in_flight"]) == ("gone", 1)
    assert 0 < gone["settled_in_seconds"] - longest_recovery_seconds(60) <= 20
    assert (lost["name"], lost["in_flight"], lost["settled_in_seconds"]) == ("lost", 0, None)
    assert lost["silent_seconds"] == pytest.approx(600, abs=60)
    assert ["lost", "vanished", "no", "report", "for", "10", "min"] in lines
    assert ["gone", "vanished"] in [line[:2] for line in lines]
    assert ["workers", "1"] in lines
    # PostgreSQL notices late that a session has ended.
    wait_until(lambda: ["workers", "none"] in words_of(prepared))
    assert document["latency_seconds"] == {"p50": 0.25, "p95": 0.25, "p99": 0.25}
    dead, running = document["workers"]
    assert dead == {"name": "gone:w1:7:cafe", "age_seconds": None, "in_flight": 1}
    assert (running["name"], running["in_flight"]) == (worker, 0)
    assert 0 <= running["age_seconds"] < 60


def test_pauses_are_shown_and_what_is_paused_has_no_age(prepared: CommandLine, tables: Books) -> None:
    tables.enqueue_one()
    pause(tables.connection, "tenant", "default")

    answer = prepared("status", "--json").json

    assert [(each["scope"], each["name"], each["until"]) for each in answer["pauses"]] == [("tenant", "default", None)]
    assert (answer["oldest_pending_seconds"], answer["longest_due_seconds"]) == (None, None)
    assert "Tenant default is paused by ann: maintenance." in prepared("status").stdout


@pytest.mark.parametrize(
    ("missing", "code"),
    [
        ({"DISPATCHER_AMQP_URL": "amqp://u:p@127.0.0.1:1/"}, 3),
        ({"DISPATCHER_QUEUE": "nowhere"}, 3),
        ({"DISPATCHER_DATABASE_URL": AWAY}, 1),
    ],
    ids=["RabbitMQ", "queue", "PostgreSQL"],
)
def test_without_queues_the_emails_are_still_counted(settled: CommandLine, missing: dict[str, str], code: int) -> None:
    ended = settled.having(**missing)("status", "--json")

    assert ended.code == code
    if code == 3:
        assert (ended.json["queues"], ended.json["emails"]["pending"]) == (None, 0)
        assert "RabbitMQ" in ended.stderr
    else:
        assert ended.stdout == ""


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


def test_ctrl_c_ends_watch_without_a_stack_trace_also_during_an_outage(settled: CommandLine) -> None:
    with settled.having(DISPATCHER_DATABASE_URL=AWAY).started("status", "--watch", "0.1") as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=DEADLINE_SECONDS)

    assert all(line.startswith(b"PostgreSQL is not available") for line in lines)
    assert (process.returncode, b"Traceback" in stderr) == (130, False)


def test_watch_redraws_the_terminal_and_restores_the_cursor(settled: CommandLine) -> None:
    ended = settled.on_terminal(
        *("status", "--watch", "0.1"),
        when=lambda screen: screen.count(b"stop with Ctrl-C") >= 3,
        then=lambda process: process.send_signal(signal.SIGINT),
    )

    assert ended.code == 130
    assert ended.stdout.count("\x1b[?25l") == ended.stdout.count("\x1b[?25h") == 1
    assert "Traceback" not in ended.stdout


def test_the_history_has_hours_up_to_two_days_then_days(storing: CommandLine, connection: psycopg.Connection) -> None:
    empty = storing("status", "--history", "7d").stdout
    at = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
    for begins_at, provider, outcome, slot, number in (
        (at, "smtp", "accepted", "a", 1200),
        (at, "smtp", "accepted", "b", 34),
        (at, "smtp", "rejected", "a", 1),
        (at - timedelta(hours=2), "ses", "deferred", "a", 5),
        (at - timedelta(days=3), "ses", "accepted", "a", 7),
    ):
        row = [begins_at, provider, outcome, slot, number]
        connection.execute("insert into email_hourly values (%s, %s, %s, %s, %s)", row)

    days = [line.split() for line in storing("status", "--history", "7d").stdout.splitlines()]
    hours = [line.split() for line in storing("status", "--history", "2d").stdout.splitlines()]
    history = storing("status", "--history", "7d", "--json").json

    assert empty == "No attempt ended in this time.\n"
    assert days[0][:3] == ["day", "(UTC)", "provider"]
    for line in (
        [f"{at - timedelta(days=3):%Y-%m-%d}", "ses", "7", "0", "0", "0", "100.0", "%"],
        [f"{at:%Y-%m-%d}", "ses", "0", "5", "0", "0", "0.0", "%"],
        ["smtp", "1,234", "0", "1", "0", "99.9", "%"],
        ["total", "ses", "7", "5", "0", "0", "58.3", "%"],
    ):
        assert line in days
    assert [f"{at:%Y-%m-%d}", "12:00", "smtp", "1,234", "0", "1", "0", "99.9", "%"] in hours
    hour = {"begins_at": f"{at:%Y-%m-%dT12:00:00Z}", "provider": "smtp", "outcome": "accepted", "attempts": 1234}
    assert hour in history["hours"]
    assert len(history["days"]) == 4


@pytest.mark.parametrize(
    ("body", "unready"),
    [
        (
            b'{"checks": {"processes": {"ok": false, "reason": "worker 0 \\u001b]0;cannot boot."}}}',
            "worker 0 \ufffd]0;cannot boot.",
        ),
        (b'{"checks": {"processes": {"ok": true, "reason": null}}}', None),
        (b'{"checks": []}', None),
        (b"not JSON", None),
    ],
)
async def test_the_reason_why_a_host_is_not_ready_has_no_control_characters(body: bytes, unready: str | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /readyz ")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + body)

    async with listening(answer) as port:
        assert await fetch_unready(Listener("127.0.0.1", port)) == unready
