"""`dispatcher cancel` and `dispatcher reschedule`: selection, output and exit codes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.cli.commandline import CommandLine
from tests.store.books import Books

WHY = ("--reason", "the campaign is wrong")


@pytest.fixture
def prepared(storing: CommandLine) -> CommandLine:
    return storing.without_process


@pytest.fixture
def tables(connection: psycopg.Connection) -> Books:
    return Books(connection)


def lane(tables: Books, name: str, count: int, **columns: object) -> list[str]:
    email_ids = tables.enqueue(count)
    for email_id in email_ids:
        tables.change(email_id, lane=name, **columns)
    return [str(email_id) for email_id in email_ids]


def test_an_email_is_cancelled_by_its_key_or_id_and_a_second_time_too(prepared: CommandLine, tables: Books) -> None:
    first, second = tables.enqueue(2, tenant_id="shop")
    key = tables.key(first)

    unknown = prepared("cancel", key, *WHY)
    done = prepared("cancel", key, str(second), "--tenant", "shop", *WHY)
    again = prepared("cancel", str(first), *WHY, "--json")

    assert unknown.code == 1
    assert (done.code, done.stderr) == (0, f"{first}: cancelled.\n{second}: cancelled.\n")
    assert (again.code, again.json["results"], again.json["unchanged"]) == (0, {"already_cancelled": 1}, {})
    assert tables.statuses() == {"cancelled": 2}


def test_too_late_names_the_status_and_the_exit_code_says_how_many(prepared: CommandLine, tables: Books) -> None:
    sending, pending = tables.enqueue(2)
    tables.change(sending, status="sending", publish_due_at=None)
    unknown = str(uuid4())

    none = prepared("cancel", str(sending), unknown, *WHY)
    some = prepared("cancel", str(sending), str(pending), *WHY, "--json")

    assert none.code == 1
    assert f"{sending}: too late: not changed, because the status is sending." in none.stderr
    assert f"{unknown}: not found in this database." in none.stderr
    assert some.code == 3
    assert some.json["results"] == {"too_late": 1, "cancelled": 1}
    assert some.json["unchanged"] == {str(sending): {"result": "too_late", "status": "sending"}}


def test_a_channel_selects_its_messages(prepared: CommandLine, tables: Books) -> None:
    (an_email,) = lane(tables, "normal", 1)
    (an_sms,) = lane(tables, "normal", 1, channel="sms")

    done = prepared("cancel", "--channel", "sms", *WHY, "--yes")

    assert done.code == 0
    assert (tables.status(UUID(an_email)), tables.status(UUID(an_sms))) == ("pending", "cancelled")


def test_a_filter_shows_what_it_selects_and_asks(prepared: CommandLine, tables: Books) -> None:
    bulk = lane(tables, "bulk", 25)
    (late,) = lane(
        tables, "bulk", 1, status="waiting", publish_due_at=None, wait_until=datetime.now(UTC) + timedelta(days=1)
    )
    lane(tables, "urgent", 1)

    dry = prepared("cancel", "--lane", "bulk", "--dry-run", "--json")
    unasked = prepared("cancel", "--lane", "bulk", *WHY)
    unchanged = tables.statuses()
    done = prepared("cancel", "--lane", "bulk", *WHY, "--yes")
    none_left = prepared("cancel", "--lane", "bulk", *WHY, "--yes")

    assert (dry.code, dry.json) == (
        0,
        {
            "selected": {"pending": 25, "waiting": 1},
            "samples": {"pending": bulk[:5], "waiting": [late]},
            "others": 0,
            "has_more": False,
            "results": {},
            "unchanged": {},
        },
    )
    assert unasked.code == 2
    assert f"25 emails: pending. For example {bulk[0]}, " in unasked.stderr
    assert f"1 email: waiting. For example {late}\n" in unasked.stderr
    assert unchanged == {"pending": 26, "waiting": 1}
    assert done.code == 0
    assert "26 emails: cancelled." in done.stderr
    assert (none_left.code, none_left.stderr) == (0, "No pending or waiting email matches.\n")
    assert tables.statuses() == {"cancelled": 26, "pending": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("cancel",), id="no selection"),
        pytest.param(("cancel", "order-17", "--lane", "bulk"), id="a name and a filter"),
        pytest.param(("cancel", "--status", "sent"), id="another status"),
        pytest.param(("cancel", "--lane", " "), id="a blank lane"),
        pytest.param(("reschedule", "order-17"), id="no time"),
        pytest.param(("reschedule", "order-17", "--now", "--send-in", "1h"), id="two times"),
        pytest.param(("reschedule", "order-17", "--send-at", "2026-12-24T18:00:00"), id="a time without a zone"),
        pytest.param(("reschedule", "order-17", "--send-at", "tomorrow"), id="words"),
    ],
)
def test_a_command_without_selection_or_time_is_refused(bare: CommandLine, arguments: tuple[str, ...]) -> None:
    assert bare.without_process(*arguments, *WHY).code == 2


def test_a_change_without_a_reason_is_refused(prepared: CommandLine, tables: Books) -> None:
    email_id = str(tables.enqueue_one())

    assert prepared("cancel", email_id).code == 2
    assert prepared("reschedule", email_id, "--now").code == 2
    assert tables.statuses() == {"pending": 1}


def test_rescheduled_emails_wait_until_the_time_in_its_zone(prepared: CommandLine, tables: Books) -> None:
    first, second = tables.enqueue(2)
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=2)

    by_time = prepared("reschedule", str(first), "--send-at", at.isoformat(), *WHY)
    by_age = prepared("reschedule", str(second), "--send-in", "2h", *WHY)
    now = prepared("reschedule", "--status", "waiting", "--newer-than", "1h", "--now", *WHY, "--yes", "--json")

    assert (by_time.code, by_time.stderr) == (0, f"{first}: rescheduled.\n")
    assert by_age.code == 0
    acts = tables.select("select email_id, detail from operator_audit order by acted_at")
    planned: dict[UUID, datetime] = {}
    for act in acts:
        planned.setdefault(act["email_id"], datetime.fromisoformat(act["detail"]["send_at"]))
    assert planned[first] == at
    assert timedelta(hours=1.9) < planned[second] - datetime.now(UTC) < timedelta(hours=2)
    assert (now.code, now.json["results"], now.json["unchanged"]) == (0, {"rescheduled": 2}, {})
    assert all(row["wait_until"] < datetime.now(UTC) + timedelta(minutes=1) for row in tables.rows())


def test_show_says_until_when_and_because_of_what_an_email_waits(prepared: CommandLine, tables: Books) -> None:
    email_id = str(tables.enqueue_one())

    prepared("reschedule", email_id, "--send-in", "2h", *WHY)
    shown = prepared("dlq", "show", email_id, "--no-queue")

    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("waits")]
    until = tables.row(UUID(email_id))["wait_until"].astimezone().isoformat(sep=" ", timespec="milliseconds")
    assert line.split(maxsplit=1)[1] == f"until {until} because it is scheduled"
    assert "reschedule" in shown.stdout.partition("operator actions")[2]


def test_an_argument_that_is_not_utf_8_is_refused(prepared: CommandLine) -> None:
    for arguments in (("cancel", "\udcff", *WHY), ("cancel", "--correlation-id", "\udcff", "--dry-run")):
        ended = prepared(*arguments)

        assert ended.code == 2
        assert "is not valid UTF-8" in ended.stderr
