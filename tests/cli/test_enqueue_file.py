"""`dispatcher enqueue --file` enqueues each valid line once, and reports the invalid lines."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

import orjson
import psycopg
import pytest

from dispatcher.cli.email_file import REFUSALS_IN_FULL
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine
from tests.waiting import wait_until


@pytest.fixture
def storing(storing: CommandLine) -> CommandLine:
    return storing.without_process


def _email(number: int, **other: Any) -> dict[str, Any]:
    return {
        "message_key": f"key-{number}",
        "from": "shop@example.com",
        "to": [f"reader-{number}@example.org"],
        "subject": f"Nr {number} ä",
        "text": "Thank you.",
        **other,
    }


def _lines(emails: Iterable[Any]) -> bytes:
    return b"".join(email if isinstance(email, bytes) else orjson.dumps(email) + b"\n" for email in emails)


def _count(connection: psycopg.Connection) -> int:
    row = connection.execute("select count(*) from email_log").fetchone()
    assert row is not None
    return int(row[0])


def test_valid_lines_are_accepted_and_already_known_in_a_second_run(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    (storing.folder / "emails.jsonl").write_bytes(_lines(map(_email, range(1200))))

    first = storing("enqueue", "--file", "emails.jsonl", "--json")
    second = storing("enqueue", "--file", "emails.jsonl", "--json")

    assert (first.code, first.json["accepted"], first.json["refused"]) == (0, 1200, 0)
    assert (second.code, second.json["accepted"], second.json["known"]) == (0, 0, 1200)
    assert _count(connection) == 1200


def test_invalid_lines_are_reported_by_number_and_valid_lines_are_enqueued(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    lines = [
        _email(1),
        b"{not json}\n",
        _email(3, to=["nobody"]),
        b"\n",
        _email(5),
        _email(1, subject="Other"),
        _email(5),
    ]

    ended = storing("enqueue", "--file", "-", stdin=_lines(lines))

    assert ended.code == 3
    refusals = dict(line.split(": ", 1) for line in ended.stderr.splitlines())
    assert refusals.keys() == {"line 2", "line 3", "line 6"}
    assert refusals["line 3"].startswith("to[0]: ")
    assert "which has different content" in refusals["line 6"]
    assert "nobody" not in ended.stderr
    assert [line.split()[:3] for line in ended.stdout.splitlines()] == [
        ["accepted", "2"],
        ["already", "known", "1"],
        ["refused", "3", "2"],
    ]
    assert _count(connection) == 2


def test_json_has_every_refusal_in_the_order_of_the_file(storing: CommandLine) -> None:
    lines = [_email(1), _email(1, subject="Other"), b"?\n"] + [b"[]\n"] * 100

    ended = storing("enqueue", "--file", "-", "--json", stdin=_lines(lines))

    assert ended.code == 3
    assert [refusal["line"] for refusal in ended.json["refusals"]] == list(range(2, 104))
    assert ended.json["refusals"][0]["field"] == "message_key"
    assert (ended.json["refused"], ended.json["conflicts"]) == (102, 1)


def test_only_the_first_refusals_are_printed_and_the_others_counted(storing: CommandLine) -> None:
    ended = storing("enqueue", "--file", "-", stdin=b"[]\n" * 1000)

    assert ended.code == 1
    lines = ended.stderr.splitlines()
    assert len(lines) == REFUSALS_IN_FULL + 1
    assert lines[-1] == f"… and {1000 - REFUSALS_IN_FULL} more (--json lists all)."


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_a_success(storing: CommandLine, content: bytes) -> None:
    ended = storing("enqueue", "--file", "-", "--json", stdin=content)

    assert (ended.code, ended.json["accepted"], ended.json["refused"]) == (0, 0, 0)


def test_file_that_cannot_be_opened_is_a_usage_error(storing: CommandLine) -> None:
    assert storing("enqueue", "--file", "nowhere.jsonl").code == 2
    assert storing("enqueue", "--file", ".").code == 2


def test_a_lost_connection_stops_the_run_and_a_second_run_enqueues_the_rest(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    with storing.started("enqueue", "--file", "-", "--json") as process:
        assert process.stdin is not None
        process.stdin.write(_lines(map(_email, range(700))))
        process.stdin.flush()
        wait_until(lambda: _count(connection) >= 500)
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where application_name = 'dispatcher enqueue' and datname = current_database()"
        )
        stdout, stderr = process.communicate(_lines(map(_email, range(700, 2000))), timeout=DEADLINE_SECONDS)

    assert process.returncode == 1
    assert orjson.loads(stdout)["accepted"] == _count(connection) == 500
    assert b"Run the same command again" in stderr
    assert b"Traceback" not in stderr

    again = storing("enqueue", "--file", "-", "--json", stdin=_lines(map(_email, range(2000))))
    assert (again.code, again.json["accepted"], again.json["known"]) == (0, 1500, 500)
    assert _count(connection) == 2000


def test_ctrl_c_ends_the_run_and_says_how_many_emails_are_stored(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    with storing.started("enqueue", "--file", "-") as process:
        assert process.stdin is not None
        process.stdin.write(_lines(map(_email, range(600))))
        process.stdin.flush()
        wait_until(lambda: _count(connection) >= 500)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=DEADLINE_SECONDS)
        assert process.stderr is not None
        stderr = process.stderr.read()

    assert process.returncode == 130
    assert b"Interrupted: at least " in stderr
    assert b"Traceback" not in stderr


def test_terminal_shows_progress_and_the_summary(storing: CommandLine) -> None:
    (storing.folder / "emails.jsonl").write_bytes(_lines([*map(_email, range(20)), b"[]\n"]))

    ended = storing.on_terminal("enqueue", "--file", "emails.jsonl")

    assert ended.code == 3
    assert "enqueueing" in ended.stdout
    assert "line 21: email: must be a JSON object" in ended.stdout


def test_lines_that_no_configured_provider_can_send_are_refused_and_the_others_accepted(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    templated = _email(1, template_id="d-1", text=None)
    (storing.folder / "emails.jsonl").write_bytes(_lines([_email(0), templated]))

    ended = storing.having(DISPATCHER_PROVIDERS="smtp")("enqueue", "--file", "emails.jsonl", "--json")

    assert (ended.code, ended.json["accepted"], ended.json["refused"]) == (3, 1, 1)
    assert ended.stderr.splitlines()[0] == (
        "line 2: template_id needs a provider with templates (resend, sendgrid, ses); configured: smtp. "
        "Add one to DISPATCHER_PROVIDERS, or set text or html."
    )
    assert ended.json["refusals"][0]["field"] == "template_id"


def test_templates_are_accepted_if_no_provider_is_configured(storing: CommandLine) -> None:
    (storing.folder / "emails.jsonl").write_bytes(_lines([_email(1, template_id="d-1", text=None)]))

    assert storing("enqueue", "--file", "emails.jsonl").code == 0


def test_the_fault_of_a_file_in_a_wrong_format_is_printed_once(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    rows = [b"key,from,to,subject,text\n"] + [f"k-{n},a@example.com,b@example.org,s,t\n".encode() for n in range(99)]
    (storing.folder / "emails.csv").write_bytes(b"".join(rows))

    done = storing("enqueue", "--file", "emails.csv")

    assert done.code == 1
    assert done.stderr.count("looks like a table separated by commas; each line must be a JSON object") == 1
    assert "… and 99 more (--json lists all)." in done.stderr
    assert len(storing("enqueue", "--file", "emails.csv", "--json").json["refusals"]) == 100


def test_the_same_fault_of_lines_that_are_not_adjacent_is_printed_with_each_number(storing: CommandLine) -> None:
    (storing.folder / "emails.jsonl").write_bytes(b"\xff\n" + _lines([_email(1)]) + b"\xff\n")

    done = storing("enqueue", "--file", "emails.jsonl")

    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["line 1", "line 3"]


def test_an_sms_to_a_country_that_is_not_allowed_is_refused_by_its_line_and_alone(storing: CommandLine) -> None:
    host = storing.having(
        DISPATCHER_SMS_PROVIDERS="twilio",
        DISPATCHER_TWILIO_ACCOUNT_SID=f"AC{'0' * 32}",
        DISPATCHER_TWILIO_SENDER="+14155550100",
    )
    lines = [
        {"channel": "sms", "message_key": f"k-{to}", "to": to, "text": "t"} for to in ("+18765551234", "+14155550101")
    ]
    (host.folder / "emails.jsonl").write_bytes(_lines(lines))

    done = host("enqueue", "--file", "emails.jsonl", "--json")
    alone = host("enqueue", "--sms", "--key", "k", "--to", "+18765551234", "--text", "t")

    assert (done.code, done.json["accepted"]) == (3, 1)
    (refusal,) = done.json["refusals"]
    assert (refusal["line"], refusal["field"]) == (1, "to")
    assert alone.code == 1
    assert "--to: is a number of JM, which DISPATCHER_SMS_COUNTRIES" in alone.stderr
