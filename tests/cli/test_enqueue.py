"""`dispatcher enqueue` of one email given by options."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from tests.cli.commandline import CommandLine, in_process

ADDRESSED = ("--key", "order-17", "--from", "Shop <shop@example.com>", "--to", "ann@example.org", "--subject", "Hi")
ONE = (*ADDRESSED, "--text", "Thank you.")


def _contents(connection: psycopg.Connection) -> dict[str, object]:
    """All columns of the only stored email."""
    rows = connection.execute(
        "select * from email_log join email_content using (email_id) left join email_attachment using (email_id)"
    )
    assert rows.description is not None
    (row,) = rows.fetchall()
    return dict(zip([column.name for column in rows.description], row, strict=True))


@pytest.fixture
def process(storing: CommandLine) -> CommandLine:
    """`dispatcher` in a process of its own."""
    return replace(storing, needs_process=True)


@pytest.fixture
def storing(storing: CommandLine) -> CommandLine:
    """`dispatcher` in the test's process."""
    return storing.without_process


def test_email_is_accepted_and_its_id_printed(storing: CommandLine, connection: psycopg.Connection) -> None:
    ended = storing("enqueue", *ONE)

    assert ended.code == 0
    stored = _contents(connection)
    assert ended.stdout == f"accepted: {stored['email_id']}\n"
    assert (stored["sender"], stored["subject"], stored["text_body"]) == ("Shop <shop@example.com>", "Hi", "Thank you.")


def test_email_is_accepted_by_the_reachable_host_of_several(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    url = storing.environment["DISPATCHER_DATABASE_URL"]
    several = f"{url.replace('@', '@127.0.0.1:1,')}?target_session_attrs=read-write"

    ended = storing.having(DISPATCHER_DATABASE_URL=several)("enqueue", *ONE)

    assert ended.code == 0, ended.stderr
    assert ended.stdout == f"accepted: {_contents(connection)['email_id']}\n"


def test_an_allowed_provider_header_is_stored(storing: CommandLine, connection: psycopg.Connection) -> None:
    allowing = storing.having(DISPATCHER_ALLOWED_PROVIDER_HEADERS="x-mc-tags")
    line = b'{"message_key": "k", "from": "a@example.com", "to": "b@example.com", "subject": "s", "text": "t"%b}'
    lines = [line % b', "headers": {"X-MC-Tags": "a"}', line % b', "headers": {"X-MC-Subaccount": "a"}']

    assert allowing("enqueue", *ONE, "--header", "X-MC-Tags: a").code == 0
    assert _contents(connection)["headers"] == {"X-MC-Tags": "a"}
    ended = allowing("enqueue", "--file", "-", stdin=b"\n".join(lines))
    assert ended.code == 3
    assert "line 2: headers.X-MC-Subaccount: controls" in ended.stderr


def test_every_option_reaches_the_tables(storing: CommandLine, connection: psycopg.Connection) -> None:
    (storing.folder / "bill.pdf").write_bytes(b"%PDF")
    (storing.folder / "page.html").write_text("<p>ä</p>", encoding="utf-8")
    options = {
        "--to": "bob@example.org",
        "--cc": "cc@example.org",
        "--bcc": "bcc@example.org",
        "--reply-to": "desk@example.com",
        "--html-file": "page.html",
        "--attach": "bill.pdf",
        "--header": "X-Campaign: spring: two",
        "--tag": "receipts",
        "--tenant": "acme",
        "--correlation-id": "request-9",
        "--on-uncertain": "resend",
    }

    ended = storing("enqueue", *ONE, "--erase-after-sending", *[word for option in options.items() for word in option])

    assert ended.code == 0, ended.stderr
    stored = _contents(connection)
    assert stored["recipients"] == {
        "to": ["ann@example.org", "bob@example.org"],
        "cc": ["cc@example.org"],
        "bcc": ["bcc@example.org"],
        "reply_to": ["desk@example.com"],
    }
    assert (stored["html_body"], stored["headers"]) == ("<p>ä</p>", {"X-Campaign": "spring: two"})
    assert (stored["filename"], stored["content_type"], stored["content"]) == ("bill.pdf", "application/pdf", b"%PDF")
    assert (stored["tags"], stored["tenant_id"]) == (["receipts", "one_time_code"], "acme")
    assert (stored["correlation_id"], stored["on_uncertain"]) == ("request-9", "resend")


def test_an_email_is_scheduled_and_expires(storing: CommandLine, connection: psycopg.Connection) -> None:
    send_at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)

    ended = storing("enqueue", *ONE, "--send-at", send_at.isoformat(), "--expires-in", "10m", "--lane", "bulk")

    assert ended.code == 0, ended.stderr
    stored = _contents(connection)
    assert (stored["status"], stored["wait_until"], stored["lane"]) == ("waiting", send_at, "bulk")
    assert stored["expires_at"] == send_at + timedelta(minutes=10)


def test_an_expiry_counts_from_now_without_a_schedule(storing: CommandLine, connection: psycopg.Connection) -> None:
    before = datetime.now(UTC)

    assert storing("enqueue", *ONE, "--expires-in", "10m").code == 0

    expires_at = _contents(connection)["expires_at"]
    assert isinstance(expires_at, datetime)
    assert timedelta(minutes=10) <= expires_at - before < timedelta(minutes=11)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--send-at", "2026-12-24T18:00:00"), 2, "must be a date and time with a zone"),
        (("--send-at", "tomorrow"), 2, "must be a date and time with a zone"),
        (("--expires-at", "2026-01-01T00:00:00Z"), 1, "expires_at: is in the past"),
        (("--expires-at", "2027-01-01T00:00:00Z", "--expires-in", "1h"), 2, "Give only one."),
    ],
)
def test_an_invalid_time_is_refused(storing: CommandLine, options: tuple[str, ...], code: int, words: str) -> None:
    ended = storing("enqueue", *ONE, *options)

    assert (ended.code, words in ended.stderr) == (code, True), ended.stderr


def test_a_file_reports_lines_that_have_expired(storing: CommandLine, connection: psycopg.Connection) -> None:
    line = b'{"message_key": "%b", "from": "a@example.com", "to": "b@example.com", "subject": "s", "text": "t"%b}'
    lines = [line % (b"1", b', "expires_at": "2026-01-01T00:00:00Z"'), line % (b"2", b"")]

    ended = storing("enqueue", "--file", "-", stdin=b"\n".join(lines))

    assert ended.code == 3
    assert "line 1: expires_at: is in the past" in ended.stderr
    assert _contents(connection)["message_key"] == "2"


def test_a_template_replaces_subject_and_body(storing: CommandLine, connection: psycopg.Connection) -> None:
    template = ("--template", "d-0c1a", "--template-data", '{"number": 17}')

    ended = storing("enqueue", *ADDRESSED[:-2], *template)

    assert ended.code == 0, ended.stderr
    stored = _contents(connection)
    assert (stored["template_id"], stored["template_data"]) == ("d-0c1a", {"number": 17})
    assert (stored["subject"], stored["text_body"], stored["html_body"]) == ("", None, None)


def test_body_may_come_from_stdin(process: CommandLine, connection: psycopg.Connection) -> None:
    ended = process("enqueue", *ADDRESSED, "--text-file", "-", stdin="from a pipe\n")

    assert ended.code == 0
    assert _contents(connection)["text_body"] == "from a pipe\n"


def test_same_key_and_content_is_known(storing: CommandLine) -> None:
    first, second = storing("enqueue", *ONE, "--json"), storing("enqueue", *ONE, "--json")

    assert (first.code, second.code) == (0, 0)
    assert first.json["acceptance"] == "accepted"
    assert second.json == {**first.json, "acceptance": "known"}


def test_same_key_with_other_content_is_refused(storing: CommandLine) -> None:
    first = storing("enqueue", *ONE, "--json")

    ended = storing("enqueue", *ADDRESSED, "--text", "Something else.")

    assert (ended.code, ended.stdout) == (1, "")
    assert first.json["email_id"] in ended.stderr
    assert "a different payload" in ended.stderr


def test_missing_key_is_explained() -> None:
    ended = in_process("enqueue", *ONE[2:])

    assert ended.code == 2
    assert "--key is missing" in ended.stderr
    assert "creates no second email" in ended.stderr


def test_all_missing_options_are_named_at_once() -> None:
    ended = in_process("enqueue")

    assert ended.code == 2
    for option in ("--key", "--from", "--to", "--subject", "--text", "--template"):
        assert option in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text-file", "nowhere.txt"], "nowhere.txt"),
        (["--text", "a", "--text-file", "-"], "--text and --text-file are both given"),
        (["--text", "a", "--header", "no colon"], "has no colon"),
        (["--text", "a", "--header", "X-A: 1", "--header", "X-A: 2"], "X-A is given twice"),
        (["--text", "a", "--attach", "nowhere.pdf"], "nowhere.pdf"),
        (["--text", "a", "--on-uncertain", "panic"], "panic"),
        (["--template", "d-0c1a", "--template-data", "{"], "--template-data is not JSON"),
        (["--file", "-"], "--file and --key cannot be combined"),
    ],
)
def test_invalid_arguments_are_usage_errors(arguments: list[str], words: str) -> None:
    ended = in_process("enqueue", *ADDRESSED, *arguments)

    assert (ended.code, ended.stdout) == (2, "")
    assert words in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "ann@@example.org"], "--to[1]: has more than one @"),
        (["--to", "ann@example.org, bob@example.org"], "--to[1]: has several addresses in one string"),
        (["--from", "nobody"], "--from: has no @"),
        (["--subject", "one\ntwo"], "--subject: "),
        (["--header", "From: other@example.com"], "--header.From: "),
        (["--header", "X-MC-Tags: a"], "--header.X-MC-Tags: controls Mailchimp Transactional"),
        (["--template", "d-0c1a"], "--template: cannot be combined with text or html"),
        (["--template-data", "{}", "--template", ""], "--template: must be"),
        (["--key", ""], "--key is missing"),
    ],
)
def test_an_invalid_email_is_refused_before_any_connection_and_the_error_names_the_option(
    arguments: list[str], words: str
) -> None:
    ended = in_process("enqueue", *ONE, *arguments)

    assert ended.code in (1, 2)
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_body_that_is_not_utf_8_is_refused(bare: CommandLine) -> None:
    ended = bare("enqueue", *ADDRESSED, "--text-file", "-", stdin=b"\xff\xfe")

    assert ended.code == 2
    assert "is not UTF-8" in ended.stderr


def test_an_email_that_no_configured_provider_can_send_is_refused(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    many = [word for number in range(50) for word in ("--to", f"reader-{number}@example.org")]

    ended = storing.having(DISPATCHER_PROVIDERS="ses")("enqueue", *ONE, *many)

    assert ended.code == 1
    assert 'Email "order-17": the number of recipients needs a provider with a limit of at least 51' in ended.stderr
    assert "configured: ses.\nAdd one to DISPATCHER_PROVIDERS, or split the email.\n" in ended.stderr
    assert connection.execute("select count(*) from email_log").fetchone() == (0,)
