"""`dispatcher enqueue`: one email given by options, and a file of emails, of which each valid line is enqueued once."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import BytesIO
from typing import Any

import orjson
import pytest

from dispatcher.cli import email_file
from dispatcher.cli.email_file import REFUSALS_IN_FULL, FileEntry, Refusal, read_entries
from dispatcher.domain.email import Email
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine, CommandResult
from tests.mime_corpus import CASES, ics
from tests.store.books import Books
from tests.waiting import wait_until

ADDRESSED = ("--key", "order-17", "--from", "Shop <shop@example.com>", "--to", "ann@example.org", "--subject", "Hi")
ONE = (*ADDRESSED, "--text", "Thank you.")
EMAIL = {"message_key": "k", "from": "a@example.com", "to": "b@example.org", "subject": "s", "text": "t"}
LINE = orjson.dumps(EMAIL)


def _contents(tables: Books) -> dict[str, Any]:
    (row,) = tables.select(
        "select * from email_log join email_content using (email_id) left join email_attachment using (email_id)"
    )
    return row


def test_an_allowed_provider_header_is_stored(storing: CommandLine, tables: Books) -> None:
    allowing = storing.having(DISPATCHER_ALLOWED_PROVIDER_HEADERS="x-mc-tags")
    lines = [EMAIL | {"headers": {"X-MC-Tags": "a"}}, EMAIL | {"headers": {"X-MC-Subaccount": "a"}}]

    assert allowing("enqueue", *ONE, "--header", "X-MC-Tags: a").code == 0
    assert _contents(tables)["headers"] == {"X-MC-Tags": "a"}
    ended = feed(allowing, lines)
    assert ended.code == 3
    assert "line 2: headers.X-MC-Subaccount: controls" in ended.stderr


def test_every_option_reaches_the_tables(storing: CommandLine, tables: Books) -> None:
    (storing.folder / "bill.pdf").write_bytes(b"%PDF")
    (storing.folder / "page.html").write_text("<p>ä</p>", encoding="utf-8")
    options = "--to bob@example.org --cc cc@example.org --bcc bcc@example.org --reply-to desk@example.com"
    options += " --html-file page.html --attach bill.pdf --header 'X-Campaign: spring: two' --tag receipts"
    options += " --metadata order=4711 --metadata 'note=a=b c' --topic newsletter"
    options += " --tenant acme --correlation-id request-9 --on-uncertain resend --erase-after-sending"

    ended = storing("enqueue", *ONE, *shlex.split(options))

    assert ended.code == 0, ended.stderr
    stored = _contents(tables)
    assert ended.stdout == f"accepted: {stored['email_id']}\n"
    recipients = {"to": ["ann@example.org", "bob@example.org"], "cc": ["cc@example.org"]}
    assert stored["recipients"] == recipients | {"bcc": ["bcc@example.org"], "reply_to": ["desk@example.com"]}
    assert (stored["html_body"], stored["headers"]) == ("<p>ä</p>", {"X-Campaign": "spring: two"})
    assert (stored["filename"], stored["content_type"], stored["content"]) == ("bill.pdf", "application/pdf", b"%PDF")
    assert (stored["tags"], stored["tenant_id"]) == (["receipts", "one_time_code"], "acme")
    assert stored["metadata"] == {"order": "4711", "note": "a=b c"}
    assert tables.row(stored["email_id"])["topic"] == "newsletter"
    assert (stored["correlation_id"], stored["on_uncertain"]) == ("request-9", "resend")
    template = ("--template", "d-0c1a", "--template-data", '{"number": 17}')
    assert storing("enqueue", *ADDRESSED[2:-2], "--key", "templated", *template).code == 0
    contents = tables.select("select template_id, template_data, subject from email_content")
    assert {"template_id": "d-0c1a", "template_data": {"number": 17}, "subject": ""} in contents


def test_a_mime_message_and_a_calendar_come_from_files(storing: CommandLine, tables: Books) -> None:
    messages = {each.name: each.message for each in CASES}
    for name in ("pgp signed", "inline image"):
        (storing.folder / f"{name}.eml").write_bytes(messages[name])
    (storing.folder / "invite.ics").write_text(ics(), encoding="utf-8")
    mime = ("enqueue", "--key", "k", "--mime", "pgp signed.eml")

    ended = [
        storing("enqueue", *ONE, "--calendar", "invite.ics"),
        storing(*mime, "--to", "ann@example.org", "--tag", "a"),
        storing("enqueue", "--key", "image", "--mime", "-", stdin=messages["inline image"]),
    ]
    refused = [
        storing(*mime, "--subject", "x"),
        storing.having(DISPATCHER_PROVIDERS="sendgrid")(*mime, "--to", "ann@example.org"),
        storing("enqueue", "--key", "bad", "--mime", "invite.ics"),
    ]

    assert [each.code for each in ended] == [0, 0, 0], [each.stderr for each in ended]
    stored = tables.select("select part, content_id, filename from email_attachment order by email_id")
    assert [tuple(row.values()) for row in stored] == [
        ("calendar", None, "invite.ics"), ("raw", None, "message.eml"), (None, "logo@shop", "logo.png"),
    ]  # fmt: skip
    assert [each.code for each in refused] == [2, 1, 1]
    assert "--mime and --subject cannot be combined" in refused[0].stderr
    assert "needs a provider with raw MIME (ses, smtp); configured: sendgrid" in refused[1].stderr
    assert "--mime invite.ics: raw: needs exactly one header From" in refused[2].stderr


def test_an_expiry_counts_from_the_schedule_or_from_now(storing: CommandLine, tables: Books) -> None:
    send_at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=3)

    now = storing("enqueue", *ONE, "--key", "now", "--expires-in", "10m")
    later = storing("enqueue", *ONE, "--send-at", send_at.isoformat(), "--expires-in", "10m", "--lane", "bulk")
    past = storing("enqueue", *ONE, "--key", "past", "--expires-at", "2026-01-01T00:00:00Z")

    assert (now.code, later.code, past.code) == (0, 0, 1)
    assert "expires_at: is in the past" in past.stderr
    stored = {row["message_key"]: row for row in tables.rows()}
    scheduled = stored["order-17"]
    assert (scheduled["status"], scheduled["wait_until"], scheduled["lane"]) == ("waiting", send_at, "bulk")
    assert scheduled["expires_at"] == send_at + timedelta(minutes=10)
    assert timedelta(minutes=9) < stored["now"]["expires_at"] - datetime.now(UTC) <= timedelta(minutes=10)


def test_a_body_may_come_from_stdin_in_utf_8(storing: CommandLine, tables: Books) -> None:
    refused = storing("enqueue", *ADDRESSED, "--text-file", "-", stdin=b"\xff\xfe")
    ended = storing("enqueue", *ADDRESSED, "--text-file", "-", stdin="from a pipe\n")

    assert (refused.code, "is not UTF-8" in refused.stderr) == (2, True)
    assert ended.code == 0
    assert _contents(tables)["text_body"] == "from a pipe\n"


def test_a_key_is_known_with_the_same_content_and_refused_with_other_content(storing: CommandLine) -> None:
    first, second = storing("enqueue", *ONE, "--json"), storing("enqueue", *ONE, "--json")
    ended = storing("enqueue", *ADDRESSED, "--text", "Something else.")

    assert (first.code, second.code) == (0, 0)
    assert first.json["acceptance"] == "accepted"
    assert second.json == {**first.json, "acceptance": "known"}
    assert (ended.code, ended.stdout) == (1, "")
    assert first.json["email_id"] in ended.stderr
    assert "a different payload" in ended.stderr


def test_missing_options_are_named_at_once_and_a_missing_key_is_explained(bare: CommandLine) -> None:
    without_key, without_all = bare("enqueue", *ONE[2:]), bare("enqueue")

    assert (without_key.code, without_all.code) == (2, 2)
    assert "--key is missing" in without_key.stderr
    assert "creates no second email" in without_key.stderr
    for option in ("--key", "--from", "--to", "--subject", "--text", "--template"):
        assert option in without_all.stderr


INVALID = {
    2: [
        (["--text-file", "nowhere.txt"], "nowhere.txt"),
        (["--text", "a", "--text-file", "-"], "--text and --text-file are both given"),
        (["--text", "a", "--header", "no colon"], "has no colon"),
        (["--text", "a", "--metadata", "order:1"], "has no equals sign. For example, write 'order=4711'"),
        (["--text", "a", "--header", "X-A: 1", "--header", "X-A: 2"], "X-A is given twice"),
        (["--text", "a", "--lane", "slow"], "there is no lane 'slow'. DISPATCHER_LANES has: urgent, normal, bulk"),
        (["--template", "d-0c1a", "--template-data", "{"], "--template-data is not JSON"),
        (["--file", "-"], "--file and --key cannot be combined"),
        (["--text", "a", "--send-at", "2026-12-24T18:00:00"], "must be a date and time with a zone"),
        (["--text", "a", "--expires-at", "2027-01-01T00:00:00Z", "--expires-in", "1h"], "Give only one."),
    ],
    1: [
        (["--text", "a", "--to", "ann@@example.org"], "--to[1]: has more than one @"),
        (["--text", "a", "--from", "nobody"], "--from: has no @"),
        (["--text", "a", "--header", "From: other@example.com"], "--header.From: "),
        (["--text", "a", "--metadata", "my order=1"], "--metadata.my order: is not a key of metadata"),
        (["--text", "a", "--template", "d-0c1a"], "--template: cannot be combined with text or html"),
        (["--text", "a", "--template-data", "{}", "--template", ""], "--template: must be"),
    ],
}


@pytest.mark.parametrize(
    ("code", "arguments", "words"), [(code, *each) for code, examples in INVALID.items() for each in examples]
)
def test_the_refusal_of_an_invalid_email_names_the_option(
    bare: CommandLine, code: int, arguments: list[str], words: str
) -> None:
    away = bare.having(DISPATCHER_DATABASE_URL="postgresql://u@127.0.0.1:1/x")
    ended = away("enqueue", *ADDRESSED, *arguments)

    assert (ended.code, ended.stdout) == (code, "")
    assert words in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


def test_an_email_that_no_configured_provider_can_send_is_refused(storing: CommandLine, tables: Books) -> None:
    many = [word for number in range(50) for word in ("--to", f"reader-{number}@example.org")]

    ended = storing.having(DISPATCHER_PROVIDERS="ses")("enqueue", *ONE, *many)

    assert ended.code == 1
    assert 'Email "order-17": the number of recipients needs a provider with a limit of at least 51' in ended.stderr
    assert "configured: ses.\nAdd one to DISPATCHER_PROVIDERS, or split the email.\n" in ended.stderr
    assert tables.count("email_log") == 0


def _email(number: int, **other: Any) -> dict[str, Any]:
    return EMAIL | {"message_key": f"key-{number}", "subject": f"Nr {number} ä", **other}


def _lines(emails: Iterable[Any]) -> bytes:
    return b"".join(email if isinstance(email, bytes) else orjson.dumps(email) + b"\n" for email in emails)


def feed(storing: CommandLine, lines: Iterable[Any], *options: str) -> CommandResult:
    return storing("enqueue", "--file", "-", *options, stdin=_lines(lines))


def test_invalid_lines_are_reported_by_number_and_valid_lines_are_enqueued(storing: CommandLine, tables: Books) -> None:
    lines = [_email(1), b"{not json}\n", _email(3, to=["nobody"]), b"\n", _email(5), _email(1, subject="Other")]
    lines += [_email(5), _email(8, expires_at="2026-01-01T00:00:00Z")]

    ended = feed(storing, lines)

    assert ended.code == 3
    refusals = dict(line.split(": ", 1) for line in ended.stderr.splitlines())
    assert refusals.keys() == {"line 2", "line 3", "line 6", "line 8"}
    assert refusals["line 3"].startswith("to[0]: ")
    assert "which has different content" in refusals["line 6"]
    assert refusals["line 8"].startswith("expires_at: is in the past")
    assert "nobody" not in ended.stderr
    counts = [["accepted", "2"], ["already", "known", "1"], ["refused", "4", "3"]]
    assert [line.split()[:3] for line in ended.stdout.splitlines()] == counts
    assert tables.count("email_log") == 2


def test_json_has_every_refusal_in_the_order_of_the_file_and_text_only_the_first(storing: CommandLine) -> None:
    lines = [_email(1), _email(1, subject="Other"), b"?\n"] + [b"[]\n"] * 100
    document, text = feed(storing, lines, "--json"), feed(storing, [b"[]\n"] * 1000)

    assert (document.code, text.code) == (3, 1)
    assert [refusal["line"] for refusal in document.json["refusals"]] == list(range(2, 104))
    assert document.json["refusals"][0]["field"] == "message_key"
    assert (document.json["refused"], document.json["conflicts"]) == (102, 1)
    shown = text.stderr.splitlines()
    assert len(shown) == REFUSALS_IN_FULL + 1
    assert shown[-1] == f"… and {1000 - REFUSALS_IN_FULL} more (--json lists all)."


def test_an_empty_file_is_a_success_and_one_that_cannot_be_opened_a_usage_error(storing: CommandLine) -> None:
    for content in (b"", b"\n \n"):
        ended = feed(storing, [content], "--json")
        assert (ended.code, ended.json["accepted"], ended.json["refused"]) == (0, 0, 0)
    assert [storing("enqueue", "--file", name).code for name in ("nowhere.jsonl", ".")] == [2, 2]


@contextmanager
def stored_batch(storing: CommandLine, tables: Books) -> Iterator[subprocess.Popen[bytes]]:
    with storing.started("enqueue", "--file", "-", "--json") as process:
        assert process.stdin is not None
        process.stdin.write(_lines(map(_email, range(700))))
        process.stdin.flush()
        wait_until(lambda: tables.count("email_log") >= 500)
        yield process


def test_a_lost_connection_stops_a_run_and_a_second_run_enqueues_the_rest(storing: CommandLine, tables: Books) -> None:
    with stored_batch(storing, tables) as process:
        tables.terminate("dispatcher enqueue")
        stdout, stderr = process.communicate(_lines(map(_email, range(700, 2000))), timeout=DEADLINE_SECONDS)

    assert process.returncode == 1
    assert orjson.loads(stdout)["accepted"] == tables.count("email_log") == 500
    assert b"Run the same command again" in stderr
    assert b"Traceback" not in stderr

    again = feed(storing, map(_email, range(2000)), "--json")
    assert (again.code, again.json["accepted"], again.json["known"]) == (0, 1500, 500)
    assert tables.count("email_log") == 2000


def test_ctrl_c_ends_the_run_and_says_how_many_emails_are_stored(storing: CommandLine, tables: Books) -> None:
    with stored_batch(storing, tables) as process:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=DEADLINE_SECONDS)
        assert process.stderr is not None
        stderr = process.stderr.read()

    assert process.returncode == 130
    assert b"Interrupted: at least " in stderr
    assert b"Traceback" not in stderr


def test_lines_that_no_configured_provider_can_send_are_refused_and_the_others_accepted(storing: CommandLine) -> None:
    lines = [_email(0), _email(1, template_id="d-1", text=None)]

    ended = feed(storing.having(DISPATCHER_PROVIDERS="smtp"), lines, "--json")

    assert (ended.code, ended.json["accepted"], ended.json["refused"]) == (3, 1, 1)
    words = "template_id needs a provider with templates (resend, sendgrid, ses); configured: smtp."
    assert ended.stderr.startswith(f"line 2: {words} Add one to DISPATCHER_PROVIDERS, or set text or html.\n")
    assert ended.json["refusals"][0]["field"] == "template_id"
    assert feed(storing, lines).code == 0  # without configured providers


def test_an_sms_to_a_country_that_is_not_allowed_is_refused_by_its_line_and_alone(storing: CommandLine) -> None:
    twilio = {"DISPATCHER_TWILIO_ACCOUNT_SID": f"AC{'0' * 32}", "DISPATCHER_TWILIO_SENDER": "+14155550100"}
    host = storing.having(DISPATCHER_SMS_PROVIDERS="twilio", **twilio)
    numbers = ("+18765551234", "+14155550101")

    done = feed(host, [{"channel": "sms", "message_key": to, "to": to, "text": "t"} for to in numbers], "--json")
    alone = host("enqueue", "--sms", "--key", "k", "--to", "+18765551234", "--text", "t")

    (refusal,) = done.json["refusals"]
    assert (done.code, done.json["accepted"], refusal["line"], refusal["field"]) == (3, 1, 1, "to")
    assert alone.code == 1
    assert "--to: is a number of JM, which DISPATCHER_SMS_COUNTRIES" in alone.stderr


def _read(content: bytes) -> list[FileEntry]:
    return list(read_entries(BytesIO(content)))


def test_spaces_line_ends_blank_lines_and_a_byte_order_mark_are_ignored() -> None:
    for content in (LINE, LINE + b"\n", LINE + b"\r\n", b"\xef\xbb\xbf" + LINE, b"  " + LINE + b"  \n"):
        (entry,) = _read(content)
        assert entry.content == Email.from_json(EMAIL)
        assert (entry.number, entry.end) == (1, len(content))
    assert [entry.number for entry in _read(b"\n" + LINE + b"\n \t\n\r\n" + LINE)] == [2, 5]


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        (b'{"a" 1}', "line", "is not JSON (unexpected character, expected ':' after key, character 6)"),
        (b"\xff\xfe{}", "line", "is UTF-16, not UTF-8; save the file as UTF-8"),
        ('{"message_key": "kü"}'.encode("latin-1"), "line", "is not UTF-8"),
        (b"message_key;from;to", "line", "looks like a table separated by semicolons; each line must be a JSON object"),
        (b"k\tshop@example.com\tann@example.org; bob@example.org", "line", "looks like a table separated by tabs"),
        (b"[" * 5000, "line", "is only a part of a JSON document; write each email as one line"),
        (b'{"message_key": "k"},', "line", "is only a part of a JSON document"),
        (b"[]", "email", "must be a JSON object"),
        (LINE.replace(b"{", b'{"message_key": "j", ', 1), "line", "has the same name twice"),
        (orjson.dumps(EMAIL | {"to": ["b@example.org", "nobody"]}), "to[1]", "@"),
        (orjson.dumps(EMAIL | {"colour": "red"}), "colour", "is unknown; allowed: "),
        (orjson.dumps({**EMAIL, "subject": None}), "subject", "is required unless template_id is set"),
    ],
)
def test_the_refusal_of_an_invalid_line_has_number_field_and_reason(line: bytes, field: str, words: str) -> None:
    good, bad = _read(LINE + b"\n" + line + b"\n")

    assert isinstance(good.content, Email)
    assert isinstance(bad.content, Refusal)
    assert (bad.content.line, bad.content.field) == (2, field)
    assert words in bad.content.reason


def test_a_line_that_is_too_long_is_refused_and_the_next_line_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(email_file, "MAX_LINE_OCTETS", len(LINE) + 1)

    before, long, after = _read(LINE + b"\n" + b"x" * 10 * len(LINE) + b"\n" + LINE)

    assert isinstance(before.content, Email)
    assert long.content == Refusal(2, "line", f"has more than {len(LINE) + 1} bytes")
    assert (after.number, after.content) == (3, before.content)
