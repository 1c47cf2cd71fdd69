"""`dispatcher find` and `dispatcher show`: one command answers "Ann got no receipt", and shows no address."""

from __future__ import annotations

import psycopg
import pytest

from tests.cli.commandline import CommandLine
from tests.store.books import Books
from tests.store.damaged_rows import insert_damaged


@pytest.fixture
def command(storing: CommandLine) -> CommandLine:
    return storing.without_process


@pytest.fixture
def tables(connection: psycopg.Connection) -> Books:
    return Books(connection)


def test_an_email_is_found_by_its_recipient_and_shown_with_its_timeline(command: CommandLine, tables: Books) -> None:
    email_id = tables.enqueue_one(to="Ann <Ann@Example.org>", tags=["receipt"])
    tables.enqueue_one(to="bob@example.net")

    found = command("find", "--to", "ann@example.org")
    document = command("find", "--to", "ANN@example.org", "--tag", "receipt", "--since", "1h", "--json").json
    shown = command("show", str(email_id), "--no-queue")
    of_dlq = command("dlq", "show", str(email_id), "--no-queue")

    assert (found.code, found.stderr) == (0, "1 email.\n")
    assert str(email_id) in found.stdout
    assert "a•••@example.org" in found.stdout
    (email,) = document["emails"]
    assert (email["id"], email["recipients"]) == (str(email_id), ["a•••@example.org"])
    assert (document["next"], document["was_cut"], document["recipients_since"]) == (None, False, None)
    assert "timeline" in shown.stdout
    assert "enqueued" in shown.stdout
    assert of_dlq.stdout.split("\n")[0] == shown.stdout.split("\n")[0]
    for ended in (found, shown):
        assert "ann@" not in ended.stdout.lower() + ended.stderr.lower()


def test_a_page_names_the_next_page(command: CommandLine, tables: Books) -> None:
    ids = [str(email_id) for email_id in tables.enqueue(3)]

    first = command("find", "--domain", "example.org", "--limit", "2", "--json").json
    second = command("find", "--domain", "example.org", "--after", first["next"], "--json").json

    assert [email["id"] for email in first["emails"] + second["emails"]] == ids[::-1]
    assert second["next"] is None


def test_exit_code_is_1_if_no_email_matches(command: CommandLine) -> None:
    ended = command("find", "--to", "nobody@example.org")

    assert (ended.code, ended.stdout, ended.stderr) == (1, "", "No email matches.\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--to", "secret"),
        ("--to", "example.org"),
        ("--domain", "secret@example.org"),
        ("--from", "secret@"),
        ("--to", ""),
    ],
)
def test_a_wrong_address_is_refused_without_repeating_it(command: CommandLine, arguments: tuple[str, str]) -> None:
    ended = command("find", *arguments)

    assert ended.code == 2
    assert "secret" not in ended.stderr


def test_failed_emails_are_counted_by_domain(command: CommandLine, tables: Books) -> None:
    for to in (["ann@example.org", "Bob <bob@EXAMPLE.org>"], ["ann@example.org", "c@example.net"]):
        tables.enqueue_one(to=to, tags=["receipt"])
    tables.connection.execute("update email_log set status = 'failed', error_type = 'refused', publish_due_at = null")

    groups = command("dlq", "list", "--by", "domain", "--json").json["groups"]
    tagged = command("dlq", "list", "--tag", "receipt", "--json").json
    others = command("dlq", "list", "--tag", "other", "--json").json

    assert [(group["value"], group["emails"]) for group in groups] == [("example.org", 2), ("example.net", 1)]
    assert (len(tagged["emails"]), len(others["emails"])) == (2, 0)


def test_unsent_emails_are_selected_by_tag(command: CommandLine, tables: Books) -> None:
    wanted, other = tables.enqueue_one(tags=["reminder"]), tables.enqueue_one()

    assert command("cancel", "--tag", "reminder", "--reason", "wrong text", "--yes").code == 0

    assert (tables.status(wanted), tables.status(other)) == ("cancelled", "pending")


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
def test_commands_show_damaged_rows_beside_all_others_in_every_time_zone(
    storing: CommandLine, tables: Books, zone: str
) -> None:
    ids = insert_damaged(tables)
    other = tables.enqueue_one()
    command = storing.having(TZ=zone)

    found = command("find", "--limit", "1000")
    named = [name for name in ids if "infinity" in name]
    shown = {name: command.without_process("show", str(ids[name]), "--no-queue") for name in named}
    others = {words: command(*words.split()) for words in ("find --json --limit 1000", "dlq list", "held list")}

    assert all(str(email_id) in found.stdout for email_id in (other, *ids.values()))
    assert {name: each.stderr for name, each in shown.items() if each.code != 0} == {}
    assert {words: each.stderr for words, each in others.items() if each.code != 0} == {}
