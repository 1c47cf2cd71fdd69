"""`dispatcher held`: the output of `list`, and the output and exit codes of `confirm` and `release`."""

from __future__ import annotations

from uuid import UUID, uuid4

import psycopg
import pytest

from tests.cli.commandline import CommandLine
from tests.store.books import Books


@pytest.fixture
def prepared(prepared: CommandLine) -> CommandLine:
    return prepared.without_process


WHY = ("--reason", "seen at the provider")


@pytest.fixture
def tables(connection: psycopg.Connection) -> Books:
    return Books(connection)


def held(tables: Books, count: int) -> list[str]:
    email_ids = tables.enqueue(count)
    for email_id in email_ids:
        tables.change(email_id, status="held", publish_due_at=None, attempt_count=1, provider="ses")
    return [str(email_id) for email_id in email_ids]


def test_a_page_names_the_next_page(prepared: CommandLine, tables: Books) -> None:
    first, second, third = held(tables, 3)

    page = prepared("held", "list", "--limit", "2", "--json").json
    rest = prepared("held", "list", "--after", page["next"], "--json").json
    shown = prepared("held", "list", "--older-than", "1h")

    assert [email["email_id"] for email in page["emails"]] == [first, second]
    assert isinstance(page["next"], str)
    assert [email["email_id"] for email in rest["emails"]] == [third]
    assert rest["next"] is None
    assert (shown.code, shown.stdout, shown.stderr) == (0, "", "No held email matches.\n")


@pytest.mark.parametrize("command", [("held", "list"), ("dlq", "list")])
def test_a_channel_selects_its_messages(prepared: CommandLine, tables: Books, command: tuple[str, str]) -> None:
    an_email, an_sms = held(tables, 2)
    tables.change(UUID(an_sms), channel="sms")

    def found(channel: str) -> list[str]:
        return [each["email_id"] for each in prepared(*command, "--channel", channel, "--json").json["emails"]]

    assert (found("email"), found("sms"), found("fax")) == ([an_email], [an_sms], [])


def test_an_expired_email_is_not_released(prepared: CommandLine, tables: Books) -> None:
    (email_id,) = held(tables, 1)
    tables.connection.execute("update email_log set expires_at = now() - interval '1 minute'")

    ended = prepared("held", "release", email_id, *WHY)

    assert ended.code == 1
    assert ended.stderr == f"{email_id}: not changed: the email has expired, and is never sent again.\n"
    assert tables.status(UUID(email_id)) == "held"


def test_a_second_decision_changes_nothing_and_says_so(prepared: CommandLine, tables: Books) -> None:
    (email_id,) = held(tables, 1)

    done = prepared("held", "confirm", email_id, *WHY)
    again = prepared("held", "confirm", email_id, *WHY)
    too_late = prepared("held", "release", email_id, *WHY, "--json")

    assert (done.code, done.stderr) == (0, f"{email_id}: confirmed; the status is now sent.\n")
    assert (again.code, again.stderr) == (0, f"{email_id}: not changed: already sent.\n")
    assert too_late.code == 0
    assert too_late.json["results"] == {"already_sent": 1}
    ((actor,),) = tables.connection.execute("select actor from operator_audit").fetchall()
    assert "@" in actor


def test_exit_code_is_3_if_some_decisions_succeed_and_1_if_none_does(prepared: CommandLine, tables: Books) -> None:
    (email_id,) = held(tables, 1)
    unknown = str(uuid4())

    assert prepared("held", "release", unknown, *WHY).code == 1
    assert prepared("held", "release", email_id, unknown, *WHY, "--actor", "ann").code == 3
    assert tables.connection.execute("select actor from operator_audit").fetchall() == [("ann",)]


def test_a_decision_without_a_reason_changes_nothing(prepared: CommandLine, tables: Books) -> None:
    (email_id,) = held(tables, 1)

    assert prepared("held", "confirm", email_id).code == 2
    assert prepared("held", "confirm", email_id, "--reason", " ").code == 2
    assert tables.statuses() == {"held": 1}


def test_message_keys_and_filters_select_held_emails(prepared: CommandLine, tables: Books) -> None:
    first, second, third, fourth = held(tables, 4)
    for email_id, words in ((second, "The lease expired."), (third, "The lease expired."), (fourth, "No answer.")):
        tables.change(UUID(email_id), last_error=words)
    key = tables.key(UUID(first))
    tenant = tables.row(UUID(first))["tenant_id"]
    matching = ("--text", "lease expired", "--provider", "ses")

    unknown = prepared("held", "confirm", key, "--tenant", "another", *WHY)
    by_key = prepared("held", "confirm", key, "--tenant", tenant, *WHY)
    listed = prepared("held", "list", *matching, "--json")
    unasked = prepared("held", "release", *matching, *WHY)
    unchanged = tables.statuses()
    by_filter = prepared("held", "release", *matching, *WHY, "--yes", "--json")
    none_left = prepared("held", "release", *matching, *WHY, "--yes")

    assert unknown.code == 1
    assert f"has no email with the message key {key!r}" in unknown.stderr
    assert (by_key.code, by_key.stderr) == (0, f"{first}: confirmed; the status is now sent.\n")
    assert [email["email_id"] for email in listed.json["emails"]] == [second, third]
    assert unasked.code == 2
    assert f"2 emails: held. For example {second}, {third}" in unasked.stderr
    assert unchanged == {"held": 3, "sent": 1}
    assert by_filter.code == 0
    assert by_filter.json["results"] == {"released": 2}
    assert (none_left.code, none_left.stderr) == (0, "No held email matches.\n")
    assert tables.statuses() == {"held": 1, "sent": 1, "pending": 2}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="no selection"),
        pytest.param(("order-17", "--provider", "ses"), id="a name and a filter"),
        pytest.param(("--provider", "tpyo"), id="an unknown provider"),
        pytest.param(("--status", "failed"), id="another status"),
        pytest.param(("--text", "", "--yes"), id="an empty text"),
        pytest.param(("--tenant", " ", "--yes"), id="a blank tenant"),
    ],
)
@pytest.mark.parametrize("decision", ["confirm", "release"])
def test_a_decision_without_names_or_filter_is_refused(
    bare: CommandLine, decision: str, arguments: tuple[str, ...]
) -> None:
    assert bare.without_process("held", decision, *arguments, *WHY).code == 2


def test_many_decisions_are_counted_and_not_listed(prepared: CommandLine, tables: Books) -> None:
    email_ids = held(tables, 21)

    ended = prepared("held", "confirm", *email_ids, *WHY)

    assert ended.stderr == "21 emails: confirmed; the status is now sent.\n"


def test_a_decision_needs_no_rabbitmq(prepared: CommandLine, tables: Books) -> None:
    (email_id,) = held(tables, 1)

    assert prepared.having(DISPATCHER_AMQP_URL="amqp://u:p@127.0.0.1:1/")("held", "confirm", email_id, *WHY).code == 0
    assert tables.statuses() == {"sent": 1}
