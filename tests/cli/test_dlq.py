"""`dispatcher dlq`: output, confirmation and exit codes. `tests/ops` tests what the commands do."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import psycopg
import pytest

from dispatcher import enqueue
from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Rabbit
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine, CommandResult, in_process
from tests.ops.dead_emails import DeadEmails
from tests.store.books import Books, email
from tests.waiting import wait_until


@pytest.fixture
def prepared(prepared: CommandLine) -> CommandLine:
    return prepared.without_process


@pytest.fixture
def settled(settled: CommandLine) -> CommandLine:
    return settled.without_process


@pytest.fixture
def bare(bare: CommandLine) -> CommandLine:
    return bare.without_process


WHY = ("--reason", "the provider is back")


@pytest.fixture
def quick(prepared: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., CommandResult]:
    """Runs commands in the test's process, which saves half a second per command."""
    for name in [name for name in os.environ if name.startswith("DISPATCHER_")]:
        monkeypatch.delenv(name)
    for name, value in prepared.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return in_process


@pytest.fixture
def tables(connection: psycopg.Connection) -> Books:
    return Books(connection)


@pytest.fixture
def dead_emails(tables: Books, servers: Servers, topology: Topology) -> DeadEmails:
    return DeadEmails(tables, Errands(servers.amqp_url), topology)  # type: ignore[arg-type]


class Errands:
    """The methods of `Rabbit` for tests without an event loop. Each call opens a connection."""

    def __init__(self, amqp_url: str) -> None:
        self._amqp_url = amqp_url

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def run(*values: Any) -> Any:
            async with await open_connection(self._amqp_url, name="test") as connection:
                return await getattr(Rabbit(connection), name)(*values)

        return run


def announce(dead_emails: DeadEmails, email_ids: list[UUID]) -> None:
    asyncio.run(dead_emails.publish_dead_letters(email_ids))


def test_filters_groups_and_pages(quick: Callable[..., CommandResult], dead_emails: DeadEmails) -> None:
    refused = [str(i) for i in dead_emails.create(3, error_type="refused", last_error="550 [blocked] by Policy")]
    (slow,) = dead_emails.create(error_type="timeout_before_send", provider="ses")

    groups = quick("dlq", "list", "--by", "error_type", "--json").json["groups"]
    page = quick("dlq", "list", "--text", "[BLOCKED]", "--limit", "2", "--json").json
    rest = quick("dlq", "list", "--text", "policy", "--limit", "2", "--after", page["next"], "--json").json
    table = quick("dlq", "list", "--provider", "ses", "--newer-than", "1h")

    assert [(group["value"], group["emails"]) for group in groups] == [("refused", 3), ("timeout_before_send", 1)]
    assert [email["email_id"] for email in page["emails"]] == refused[:0:-1]
    assert ([email["email_id"] for email in rest["emails"]], rest["next"]) == (refused[:1], None)
    assert str(slow) in table.stdout


def test_show_takes_an_id_or_a_key_and_reveals_content_only_with_a_reason(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create(correlation_id="order-17", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    announce(dead_emails, [email_id])
    dead_emails.books.connection.execute(
        "insert into email_attempt values (%s, 3, 'host:w0', 'smtp', now(), now(), 'rejected', 'refused', 'no', '550')",
        [email_id],
    )
    key = dead_emails.books.key(email_id)

    document = quick("dlq", "show", key, "--json").json
    shown = quick("dlq", "show", str(email_id))
    refused = quick("dlq", "show", key, "--reveal")
    revealed = quick("dlq", "show", key, "--reveal", "--reason", "ticket 4711", "--json").json

    assert (document["id"], document["correlation_id"]) == (str(email_id), "order-17")
    assert document["attempts"][0]["provider_code"] == "550"
    assert (document["dlq"][0]["position"], document["dlq"][0]["is_stale"]) == (0, False)
    assert "host:w0" in shown.stdout
    for empty_field in ("1970", "crash", "base", "x-death", "None", "False"):
        assert empty_field not in shown.stdout
    assert "ann@example.org" not in shown.stdout + orjson.dumps(document).decode()
    assert refused.code == 2
    assert revealed["content"]["recipients"] == {"to": ["ann@example.org"]}
    assert [(act["action"], act["reason"]) for act in revealed["acts"]] == [("reveal", "ticket 4711")]


def test_dlq_show_says_why_a_pending_email_waits(quick: Callable[..., CommandResult], tables: Books) -> None:
    (email_id,) = tables.enqueue(1)

    document = quick("dlq", "show", str(email_id), "--no-queue", "--json").json["waiting"]
    shown = quick("dlq", "show", str(email_id), "--no-queue").stdout

    assert (document["reason"], document["until"], document["ahead"]) == ("no_relay", None, None)
    assert f"no relay: {document['detail']}" in shown


@pytest.mark.parametrize("key", ["0198c2f4-0000-7000-8000-000000000000", "0198c2f4" * 4])
def test_a_message_key_that_looks_like_an_id_is_found(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails, connection: psycopg.Connection, key: str
) -> None:
    email_id = enqueue(connection, email(key)).email_id
    announced = dead_emails.create()
    announce(dead_emails, announced)

    document = quick("dlq", "show", key, "--json").json
    by_id = quick("dlq", "show", str(email_id), "--no-queue", "--json").json

    assert (document["id"], document["message_key"], document["dlq"]) == (str(email_id), key, [])
    assert by_id == {**document, "dlq": None}


def test_show_names_the_message_id_and_the_refused_recipients_of_a_sent_email(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    words = "refused recipients: 2 (550 5.1.1); 250 Ok"
    (email_id,) = dead_emails.create(status="sent", error_type=None, last_error=words, provider_message_id="4fQ8")
    dead_emails.books.connection.execute(
        "insert into email_attempt values"
        " (%s, 1, 'host:w0', 'smtp', now(), now(), 'deferred', 'throttled', 'slow', '451'),"
        " (%s, 2, 'host:w0', 'smtp', now(), now(), 'accepted', null, %s, null)",
        [email_id, email_id, words],
    )

    shown = quick("dlq", "show", str(email_id), "--no-queue").stdout

    fields, _, attempts = shown.partition("\nattempts (by the clock of the sending host)\n")
    assert "recipients 2 (550 5.1.1), in the order To, Cc, Bcc: the provider refused these" in fields
    assert re.search(rf"^answer +{re.escape(words)}$", fields, re.MULTILINE)
    assert "last error" not in fields
    assert f"<{email_id}@…>" in fields
    assert "4fQ8" in fields
    assert re.split(" {2,}", attempts.splitlines()[0]) == [
        "attempt", "worker", "provider", "started", "finished", "outcome", "error type", "code", "error",
    ]  # fmt: skip


def test_show_names_the_recipients_of_an_email_that_was_delivered_in_part(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create(status="failed", error_type="partly_delivered", last_error="delivered to 2 of 3")
    dead_emails.books.change(email_id, recipient_outcomes='{"1": null, "2": null}')

    shown = quick("dlq", "show", str(email_id), "--no-queue").stdout

    assert re.search(r"^delivered to +recipients 1-2, in the order To, Cc, Bcc", shown, re.MULTILINE)
    assert "recipient_outcomes" not in shown


def test_an_unknown_email_message_or_replay_is_a_failure(settled: CommandLine) -> None:
    assert settled("dlq", "show", "nothing").code == 1
    assert settled("dlq", "show", "p-000000000000").code == 1
    assert settled("dlq", "stop", "1", *WHY).code == 1
    assert settled("dlq", "replay", "--resume", "1").code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(WHY, id="no selection"),
        pytest.param(("--all",), id="no reason"),
        pytest.param(("00000000-0000-7000-8000-000000000000", "--provider", "ses", *WHY), id="ids and a filter"),
        pytest.param(("--older-than", "soon", *WHY), id="not a length of time"),
    ],
)
def test_wrong_usage_of_replay_is_refused(bare: CommandLine, arguments: tuple[str, ...]) -> None:
    ended = bare("dlq", "replay", *arguments)

    assert (ended.code, ended.stdout) == (2, "")


@pytest.mark.parametrize("command", ["list", "replay", "discard"])
@pytest.mark.parametrize(("option", "known"), [("--error-type", "rejected_recipient"), ("--provider", "sendgrid")])
def test_a_misspelt_filter_is_refused(bare: CommandLine, command: str, option: str, known: str) -> None:
    ended = bare("dlq", command, option, "tpyo", *(() if command == "list" else WHY))

    assert (ended.code, ended.stdout) == (2, "")
    assert known in ended.stderr


def test_without_yes_and_without_a_terminal_nothing_is_replayed(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create()

    asked = quick("dlq", "replay", "--all", *WHY)
    none = quick("dlq", "replay", "--provider", "ses", *WHY, "--yes")
    dry = quick("dlq", "replay", "--all", "--dry-run", "--json")

    assert (none.code, none.stderr) == (0, "No failed or held email matches.\n")
    assert asked.code == 2
    assert f"1 email: can be sent again. For example {email_id}" in asked.stderr
    assert "Add --yes." in asked.stderr
    assert (dry.code, dry.json["emails"]) == (0, {"replayed": 1})
    assert dead_emails.books.statuses() == {"failed": 1}


def test_a_partial_replay_exits_with_3_and_says_what_was_skipped_and_why(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    (failed,), (held,), (sent,) = (
        dead_emails.create(),
        dead_emails.create(status="held"),
        dead_emails.create(status="sent"),
    )
    announce(dead_emails, [failed, held])

    ended = quick("dlq", "replay", *map(str, (failed, held, sent)), *WHY, "--yes", "--json")

    assert ended.code == 3
    assert ended.json["skipped_emails"] == {str(held): "may_have_arrived", str(sent): "already_sent"}
    assert (ended.json["replayed"], ended.json["state"]) == (1, "done")
    assert "skipped 1: already sent" in ended.stderr


async def test_a_replay_of_one_email_needs_few_statements_one_session_and_no_rabbitmq(
    prepared: CommandLine, tables: Books
) -> None:
    (email_id,) = tables.enqueue(1)
    tables.change(email_id, status="failed", publish_due_at=None, attempt_count=3)

    async with Proxy(prepared.environment["DISPATCHER_DATABASE_URL"]) as proxy:
        command = prepared.having(DISPATCHER_DATABASE_URL=proxy.url, DISPATCHER_AMQP_URL="amqp://u:p@127.0.0.1:1/")
        ended = await asyncio.to_thread(command, "dlq", "replay", tables.key(email_id), *WHY, "--yes")

    statements = [each for each in statements_in(bytes(proxy.received)) if not SET_UP.match(each)]
    assert (ended.code, tables.status(email_id), proxy.connections) == (0, "pending", 1)
    assert 0 < len(statements) <= 6, statements


SET_UP = re.compile(rb"begin|commit|set |select (pg_catalog\.)?set_config|select current_setting", re.IGNORECASE)


def statements_in(sent: bytes) -> list[bytes]:
    """The statements of a PostgreSQL client: of its messages Query and Parse."""
    while (length := int.from_bytes(sent[:4])) and sent[4:8] in (b"\x04\xd2\x16\x2f", b"\x00\x03\x00\x00"):
        sent = sent[length:]  # the messages SSLRequest and StartupMessage have no type
    found = []
    while sent:
        kind, length = sent[:1], int.from_bytes(sent[1:5])
        if kind in b"QP":
            found.append(sent[5 : 1 + length].split(b"\0")[kind == b"P"])
        sent = sent[1 + length :]
    return found


def test_skipped_emails_are_counted_and_not_listed(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    failed, *sent = [*dead_emails.create(), *dead_emails.create(3, status="sent")]

    ended = quick("dlq", "replay", *map(str, (failed, *sent)), *WHY, "--yes")

    assert ended.code == 3
    assert [line for line in ended.stderr.splitlines() if "skipped" in line and "already" in line] == [
        "skipped 3: already sent"
    ]
    assert not any(str(email_id) in ended.stderr for email_id in sent)


def test_emails_can_be_named_by_message_keys_and_by_ids(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    first, second, third = dead_emails.create(3)
    keys = [dead_emails.books.key(email_id) for email_id in (first, second)]
    tenant = dead_emails.books.row(first)["tenant_id"]

    foreign = quick("dlq", "replay", keys[0], "--tenant", "another", *WHY, "--yes")
    replayed = quick("dlq", "replay", keys[0], str(third), "--tenant", tenant, *WHY, "--yes")
    discarded = quick("dlq", "discard", keys[1], "--tenant", tenant, *WHY, "--yes")

    assert foreign.code == 1
    assert f"Tenant 'another' has no email with the message key {keys[0]!r}" in foreign.stderr
    assert (replayed.code, discarded.code) == (0, 0)
    assert [dead_emails.books.status(each) for each in (first, second, third)] == ["pending", "failed", "pending"]
    assert dead_emails.books.row(second)["dead_letter_discarded_at"] is not None


def test_a_long_error_moves_no_column_of_the_table(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    dead_emails.create(last_error="550 " + "x" * 400)
    dead_emails.create(2, last_error="451")

    lines = quick("dlq", "list", "--by", "error").stdout.splitlines()

    assert [line.split()[0] for line in lines] == ["emails", lines[1], "2", "1"]
    assert len({line.index(word) for line, word in zip(lines[2:], ("451", "550"), strict=True)}) == 1
    assert lines[0].index("error") < 70


def test_from_queue_replays_only_emails_with_a_dead_letter(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    announced, _ = dead_emails.create(2)
    announce(dead_emails, [announced])

    ended = quick("dlq", "replay", "--from-queue", *WHY, "--yes", "--json")

    assert (ended.code, ended.json["source"], ended.json["replayed"]) == (0, "queue", 1)
    assert dead_emails.books.status(announced) == "pending"
    assert dead_emails.books.statuses() == {"pending": 1, "failed": 1}


def test_from_queue_does_not_replay_a_discarded_email_whose_dead_letter_is_still_on_the_dlq(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    announced, discarded = dead_emails.create(2)
    announce(dead_emails, [announced, discarded])
    dead_emails.books.change(discarded, dead_letter_discarded_at=datetime.now(UTC))

    dry = quick("dlq", "replay", "--from-queue", "--dry-run", "--json")
    ended = quick("dlq", "replay", "--from-queue", *WHY, "--yes", "--json")

    assert (dry.json["emails"], dry.json["not_failed_or_held"]) == ({"replayed": 1}, 0)
    assert (ended.code, ended.json["replayed"], ended.json["total"]) == (0, 1, 1)
    assert dead_emails.books.status(discarded) == "failed"


def test_a_locked_email_is_left_waiting_and_reported_while_the_others_are_replayed(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails, tables: Books, database_url: str
) -> None:
    locked, _ = dead_emails.create(2)

    with psycopg.connect(database_url) as other:
        Books(other).lock(locked)
        ended = quick("dlq", "replay", "--all", *WHY, "--yes", "--json")
    resumed = quick("dlq", "replay", "--resume", "1", "--json")

    assert (ended.code, ended.json["locked"], ended.json["waiting"], ended.json["state"]) == (3, 1, 1, "interrupted")
    assert "1 remaining email cannot be replayed now: another transaction has locked its row" in ended.stderr
    assert "To continue: dispatcher dlq replay --resume 1" in ended.stderr
    assert (resumed.code, resumed.json["replayed"], resumed.json["locked"]) == (0, 2, 0)


def test_a_replay_names_a_running_replay_of_the_same_emails_before_it_starts(
    prepared: CommandLine, quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    dead_emails.create(3)
    why = ("--reason", "SES is back", "--actor", "ann")
    with prepared.started("dlq", "replay", "--all", "--rate", "0.01", *why, "--yes") as process:
        wait_until(lambda: process.poll() is not None or dead_emails.books.statuses().get("pending"))
        dry = quick("dlq", "replay", "--all", "--dry-run", "--json").json["overlaps"]
        asked = quick("dlq", "replay", "--all", *WHY)
        forced = quick("dlq", "replay", "--all", *WHY, "--rate", "0", "--force", "--yes")

    assert [(met["id"], met["actor"], met["per_second"], met["emails"]) for met in dry] == [(1, "ann", 0.01, 2)]
    assert asked.code == 2
    assert (
        "Replay 1 by ann (SES is back; 0.01/s) is running and still has to replay 2 of these emails.\n"
        "All these replays share one rate, the lowest of their rates. To keep your own rate, add --force.\n"
    ) in asked.stderr
    assert "This replay keeps its own rate." in forced.stderr
    assert (forced.code, dead_emails.books.statuses()) == (0, {"pending": 3})


def test_a_killed_replay_loses_nothing_and_is_resumed(
    prepared: CommandLine, quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    dead_emails.create(200)
    with prepared.started("dlq", "replay", "--all", "--rate", "10", *WHY, "--yes") as process:
        while dead_emails.books.statuses()["pending"] < 3:
            assert process.poll() is None
        process.kill()
        process.wait(timeout=DEADLINE_SECONDS)

    def interrupted() -> Any:
        """The replay, once it is listed as interrupted. PostgreSQL notices late that the command has died."""
        (replay,) = quick("dlq", "replays", "--json").json["replays"]
        return replay if replay["state"] != "running" else None

    found = wait_until(interrupted)
    resumed = quick("dlq", "replay", "--resume", str(found["id"]), "--rate", "10000", "--json")

    assert found["state"] == "interrupted"
    assert 3 <= found["outcomes"]["replayed"] < 200
    assert (resumed.code, resumed.json["replayed"], resumed.json["state"]) == (0, 200, "done")


def test_ctrl_c_says_how_to_continue(prepared: CommandLine, dead_emails: DeadEmails) -> None:
    dead_emails.create(200)
    with prepared.started("dlq", "replay", "--all", "--rate", "10", *WHY, "--yes", stderr=subprocess.PIPE) as process:
        while dead_emails.books.statuses()["pending"] < 3:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 130
    assert b"To continue: dispatcher dlq replay --resume 1" in stderr
    assert b"Traceback" not in stderr


def test_a_terminal_shows_the_question_and_a_progress_bar(prepared: CommandLine, dead_emails: DeadEmails) -> None:
    dead_emails.create(3)
    ours, theirs = pty.openpty()
    with prepared.started("dlq", "replay", "--all", *WHY, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        screen = b""
        while b"Replay 3 emails?" not in screen:
            screen += os.read(ours, 65536)
        os.write(ours, b"y\n")
        try:
            while read := os.read(ours, 65536):
                screen += read
        except OSError:  # Linux reports the closed terminal as an error
            os.close(ours)
        code = process.wait(timeout=DEADLINE_SECONDS)

    assert code == 0
    assert b"3/3" in screen
    assert dead_emails.books.statuses() == {"pending": 3}


@pytest.mark.parametrize("choice", [("--all",), ("--text", "SES")], ids=["all", "filter"])
def test_emails_that_fail_after_the_question_are_not_replayed(
    prepared: CommandLine, dead_emails: DeadEmails, choice: tuple[str, ...]
) -> None:
    dead_emails.create(2, last_error="SES is away.")
    ours, theirs = pty.openpty()
    with prepared.started("dlq", "replay", *choice, *WHY, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        screen = b""
        while b"Replay 2 emails?" not in screen:
            screen += os.read(ours, 65536)
        later = dead_emails.create(3, last_error="SES is away.")
        os.write(ours, b"y\n")
        with suppress(OSError):  # Linux reports the closed terminal as an error
            while os.read(ours, 65536):
                pass
        os.close(ours)
        process.wait(timeout=DEADLINE_SECONDS)

    assert process.returncode == 0
    assert dead_emails.books.statuses() == {"pending": 2, "failed": 3}
    assert {dead_emails.books.status(email_id) for email_id in later} == {"failed"}


def test_poison_is_listed_shown_exported_repaired_and_discarded(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails, tmp_path: Path
) -> None:
    (email_id,) = dead_emails.books.enqueue(1)
    for body in (b"\x1b[2Jgarbage", b"more"):
        asyncio.run(dead_emails.publish(body))
    repaired = tmp_path / "repaired.json"
    repaired.write_text(f'{{"v": 1, "email_id": "{email_id}", "message_key": "{dead_emails.books.key(email_id)}"}}')

    first, second = quick("dlq", "list", "--poison", "--json").json["poison"]
    shown = quick("dlq", "show", first["poison_id"], "--hex", "--export", "exported")
    broken = quick("dlq", "replay", second["poison_id"], "--body", "exported", *WHY)
    fixed = quick("dlq", "replay", second["poison_id"], "--body", str(repaired), *WHY)
    asked = quick("dlq", "discard", first["poison_id"], *WHY)
    dry = quick("dlq", "discard", first["poison_id"], "--dry-run", "--yes")
    limited = quick("dlq", "list", "--poison", "--json", "--limit", "1")
    unlimited = quick("dlq", "list", "--poison", "--limit", "many")
    discarded = quick("dlq", "discard", first["poison_id"], *WHY, "--yes")

    assert first["beginning"] == "\\x1b[2Jgarbage"
    assert "1b 5b 32 4a" in shown.stdout
    assert (tmp_path / "exported").read_bytes() == b"\x1b[2Jgarbage"
    assert (broken.code, fixed.code, asked.code, discarded.code) == (1, 0, 2, 0)
    assert (dry.code, "Nothing was changed." in dry.stderr, unlimited.code) == (0, True, 2)
    assert [each["poison_id"] for each in limited.json["poison"]] == [first["poison_id"]]
    assert quick("dlq", "list", "--poison", "--json").json == {"poison": [], "total": 0}
    (taken,) = asyncio.run(dead_emails.rabbit.take_all(dead_emails.topology.queue, 1))
    assert taken.body == repaired.read_bytes()


def test_discarded_emails_leave_the_list_and_can_still_be_replayed(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create()
    announce(dead_emails, [email_id])

    discarded = quick("dlq", "discard", str(email_id), *WHY, "--yes")
    listed = [len(quick("dlq", "list", *option, "--json").json["emails"]) for option in ((), ("--discarded",))]
    replayed = quick("dlq", "replay", str(email_id), *WHY, "--yes")

    assert discarded.code == 0
    assert f"{email_id}: its dead letter is discarded." in discarded.stderr
    assert listed == [0, 1]
    assert replayed.code == 0
    assert dead_emails.books.status(email_id) == "pending"


def test_reconcile_exits_with_3_until_the_differences_are_repaired(
    quick: Callable[..., CommandResult], dead_emails: DeadEmails
) -> None:
    dead_emails.create(2)

    document = quick("dlq", "reconcile")
    nameless = quick("dlq", "reconcile", "--fix")
    fixed = quick("dlq", "reconcile", "--fix", *WHY, "--json")

    assert (document.code, nameless.code, fixed.code) == (3, 2, 0)
    assert "2 missing" in document.stderr
    assert (len(fixed.json["missing"]), fixed.json["fixed"]) == (2, True)
    assert quick("dlq", "reconcile").code == 0
