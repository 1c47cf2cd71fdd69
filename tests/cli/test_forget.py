"""`dispatcher forget`: its output, its exit codes, and that it asks before it erases."""

from __future__ import annotations

import psycopg
import pytest

from dispatcher import Sms, enqueue
from tests.cli.commandline import CommandLine
from tests.store.books import Books

ADDRESS = "ann@example.org"
WHY = ("--reason", "request 4711")


@pytest.fixture
def prepared(prepared: CommandLine) -> CommandLine:
    return prepared.without_process


@pytest.fixture
def tables(connection: psycopg.Connection) -> Books:
    return Books(connection)


def test_it_erases_finished_emails_and_exits_3_while_others_are_left(prepared: CommandLine, tables: Books) -> None:
    sent, pending = tables.enqueue(2, to=ADDRESS)
    tables.change(sent, status="sent", publish_due_at=None)

    planned = prepared("forget", ADDRESS, *WHY, "--dry-run", "--json")
    refused = prepared("forget", ADDRESS, *WHY)
    done = prepared("forget", f"Ann <{ADDRESS}>", *WHY, "--yes", "--actor", "bob")
    tables.change(pending, status="sent", publish_due_at=None)
    rest = prepared("forget", ADDRESS, *WHY, "--yes", "--json")
    again = prepared("forget", ADDRESS, *WHY, "--yes")

    expected = {"dry_run": True, "emails": 1, "contents": 1, "attachments": 0, "events": 0, "suppressions": 0,
                "unfinished": [str(pending)], "locked": [], "read": 2}  # fmt: skip
    assert (planned.code, planned.json) == (3, expected)
    assert refused.code == 2
    assert "Add --yes" in refused.stderr
    assert done.code == 3
    remedy = "Cancel such emails, or run the command again when they are finished."
    assert done.stderr.splitlines() == [
        "Erased the address from 1 email: 1 content, 0 attachments, 0 events.",
        f"Not changed: 1 email (pending, waiting or sending): {pending}. {remedy}",
    ]
    assert (rest.code, rest.json["emails"], rest.json["unfinished"]) == (0, 1, [])
    assert (again.code, again.stderr) == (0, "Erased the address from 0 emails: 0 contents, 0 attachments, 0 events.\n")
    assert ADDRESS not in done.stderr + done.stdout
    audited = tables.connection.execute("select actor, action, reason from operator_audit order by audit_id").fetchall()
    assert (audited[0], len(audited)) == (("bob", "forget", "request 4711"), 2)


@pytest.mark.parametrize("address", ["not an address", "example.org", "ann@", "+0"])
def test_a_text_that_is_no_address_is_wrong_usage(prepared: CommandLine, address: str) -> None:
    assert prepared("forget", address, *WHY, "--yes").code == 2


def test_a_number_is_forgotten_with_its_sms(prepared: CommandLine, tables: Books) -> None:
    sms = Sms(message_key="login-1", to="+4915112345678", text="1234 is your code.")
    email_id = enqueue(tables.connection, sms).email_id
    tables.change(email_id, status="sent", publish_due_at=None)

    done = prepared("forget", "+49 151 12345678", *WHY, "--yes", "--json")
    wrong = prepared("forget", "+1", *WHY, "--yes")

    assert (done.code, done.json["contents"]) == (0, 1)
    assert tables.select("select from email_content") == []
    assert (wrong.code, "The number must be a phone number" in wrong.stderr) == (2, True)
