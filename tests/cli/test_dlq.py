"""`dispatcher dlq`: output, confirmation and exit codes. `tests/ops` tests what the commands do."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
import pytest

from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.broker.rabbit import Rabbit
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine
from tests.ops.dead_emails import DeadEmails
from tests.store.books import Books
from tests.waiting import wait_until

WHY = ("--reason", "the provider is back")


@pytest.fixture
def offline(storing: CommandLine) -> CommandLine:
    return storing.having(DISPATCHER_AMQP_URL="amqp://u:p@127.0.0.1:1/")


@pytest.fixture
def dead(tables: Books) -> DeadEmails:
    nowhere: Any = None
    return DeadEmails(tables, nowhere, nowhere)


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


def test_filters_groups_and_pages(offline: CommandLine, dead: DeadEmails) -> None:
    refused = [str(i) for i in dead.create(3, error_type="refused", last_error="550 [blocked] by Policy")]
    (slow,) = dead.create(error_type="timeout_before_send", provider="ses")

    groups = offline("dlq", "list", "--by", "error_type", "--json").json["groups"]
    page = offline("dlq", "list", "--text", "[BLOCKED]", "--limit", "2", "--json").json
    rest = offline("dlq", "list", "--text", "policy", "--limit", "2", "--after", page["next"], "--json").json
    table = offline("dlq", "list", "--provider", "ses", "--newer-than", "1h")
    _, *lines = offline("dlq", "list", "--text", "policy", "--limit", "2", "--csv").stdout.splitlines()
    no_rows = offline("dlq", "list", "--by", "error_type", "--csv")

    assert [(group["value"], group["emails"]) for group in groups] == [("refused", 3), ("timeout_before_send", 1)]
    assert [email["email_id"] for email in page["emails"]] == refused[:0:-1]
    assert ([email["email_id"] for email in rest["emails"]], rest["next"]) == (refused[:1], None)
    assert str(slow) in table.stdout
    assert [line[1:37] for line in lines] == refused[::-1]
    assert no_rows.code == 2


def test_show_takes_an_id_or_key_and_reveals_only_with_a_reason(prepared: CommandLine, dead_emails: DeadEmails) -> None:
    (email_id,) = dead_emails.create(correlation_id="order-17", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    announce(dead_emails, [email_id])
    dead_emails.books.connection.execute(
        "insert into email_attempt values (%s, 3, 'host:w0', 'smtp', now(), now(), 'rejected', 'refused', 'no', '550')",
        [email_id],
    )
    key = dead_emails.books.key(email_id)

    document = prepared("dlq", "show", key, "--json").json
    shown = prepared("dlq", "show", str(email_id))
    refused = prepared("dlq", "show", key, "--reveal")
    revealed = prepared("dlq", "show", key, "--reveal", "--reason", "ticket 4711", "--json").json

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


def test_an_unknown_email_message_or_replay_is_a_failure(settled: CommandLine) -> None:
    for words in ("show nothing", "show p-000000000000", "stop 1 --reason x", "replay --resume 1"):
        assert settled("dlq", *words.split()).code == 1


def test_without_yes_and_without_a_terminal_nothing_is_replayed(offline: CommandLine, dead: DeadEmails) -> None:
    (email_id,) = dead.create()

    asked = offline("dlq", "replay", "--all", *WHY)
    none = offline("dlq", "replay", "--provider", "ses", *WHY, "--yes")
    dry = offline("dlq", "replay", "--all", "--dry-run", "--json")

    assert (none.code, none.stderr) == (0, "No failed or held email matches.\n")
    assert asked.code == 2
    assert f"1 email: can be sent again. For example:\n  {email_id}\n" in asked.stderr
    assert "Add --yes." in asked.stderr
    assert (dry.code, dry.json["emails"]) == (0, {"replayed": 1})
    assert dead.books.statuses() == {"failed": 1}


def test_a_partial_replay_exits_with_3_and_says_what_it_skipped_and_why(offline: CommandLine, dead: DeadEmails) -> None:
    failed, (held,), sent = dead.create(2), dead.create(status="held"), dead.create(4, status="sent")

    ended = offline("dlq", "replay", *map(str, (failed[0], held, sent[0])), *WHY, "--yes", "--json")
    counted = offline("dlq", "replay", *map(str, (failed[1], *sent[1:])), *WHY, "--yes")

    assert (ended.code, counted.code) == (3, 3)
    assert ended.json["skipped_emails"] == {str(held): "may_have_arrived", str(sent[0]): "already_sent"}
    assert (ended.json["replayed"], ended.json["state"]) == (1, "done")
    assert "skipped 1: already sent" in ended.stderr
    assert [line for line in counted.stderr.splitlines() if "skipped" in line and "already" in line] == [
        "skipped 3: already sent"
    ]
    assert not any(str(email_id) in counted.stderr for email_id in sent)


def test_named_emails_are_replayed_also_after_a_discard(offline: CommandLine, dead: DeadEmails) -> None:
    first, second, third = dead.create(3)
    keys = [dead.books.key(email_id) for email_id in (first, second)]
    tenant = dead.books.row(first)["tenant_id"]

    foreign = offline("dlq", "replay", keys[0], "--tenant", "another", *WHY, "--yes")
    replayed = offline("dlq", "replay", keys[0], str(third), "--tenant", tenant, *WHY, "--yes")
    discarded = offline("dlq", "discard", keys[1], "--tenant", tenant, *WHY, "--yes")
    discarded_at = dead.books.row(second)["dead_letter_discarded_at"]
    listed = [len(offline("dlq", "list", *option, "--json").json["emails"]) for option in ((), ("--discarded",))]
    statuses = [dead.books.status(each) for each in (first, second, third)]
    again = offline("dlq", "replay", str(second), *WHY, "--yes")

    assert foreign.code == 1
    assert f"Tenant 'another' has no email with the message key {keys[0]!r}" in foreign.stderr
    assert (replayed.code, discarded.code, discarded_at is None) == (0, 0, False)
    assert f"{second}: its dead letter is discarded." in discarded.stderr
    assert (statuses, listed) == (["pending", "failed", "pending"], [0, 1])
    assert (again.code, dead.books.status(second)) == (0, "pending")


def test_from_queue_replays_only_undecided_emails_with_a_dead_letter(
    prepared: CommandLine, dead_emails: DeadEmails
) -> None:
    announced, discarded, _ = dead_emails.create(3)
    announce(dead_emails, [announced, discarded])
    dead_emails.books.change(discarded, dead_letter_discarded_at=datetime.now(UTC))

    dry = prepared("dlq", "replay", "--from-queue", "--dry-run", "--json")
    ended = prepared("dlq", "replay", "--from-queue", *WHY, "--yes", "--json")

    assert (dry.json["emails"], dry.json["not_failed_or_held"]) == ({"replayed": 1}, 0)
    assert (ended.code, ended.json["source"], ended.json["replayed"], ended.json["total"]) == (0, "queue", 1, 1)
    assert dead_emails.books.status(announced) == "pending"
    assert dead_emails.books.statuses() == {"pending": 1, "failed": 2}


def test_a_replay_first_names_a_running_replay_of_the_same_emails(offline: CommandLine, dead: DeadEmails) -> None:
    dead.create(3)
    why = ("--reason", "SES is back", "--actor", "ann")
    with offline.started("dlq", "replay", "--all", "--rate", "0.01", *why, "--yes") as process:
        wait_until(lambda: process.poll() is not None or dead.books.statuses().get("pending"))
        dry = offline("dlq", "replay", "--all", "--dry-run", "--json").json["overlaps"]
        asked = offline("dlq", "replay", "--all", *WHY)
        forced = offline("dlq", "replay", "--all", *WHY, "--rate", "0", "--force", "--yes")

    assert [(met["id"], met["actor"], met["per_second"], met["emails"]) for met in dry] == [(1, "ann", 0.01, 2)]
    assert asked.code == 2
    assert (
        "Replay 1 by ann (SES is back; 0.01/s) is running and still has to replay 2 of these emails.\n"
        "All these replays share one rate, the lowest of their rates. To keep your own rate, add --force.\n"
    ) in asked.stderr
    assert "This replay keeps its own rate." in forced.stderr
    assert (forced.code, dead.books.statuses()) == (0, {"pending": 3})


def test_a_replay_that_a_signal_ends_can_be_resumed(offline: CommandLine, dead: DeadEmails) -> None:
    def stopped(number: int, *words: str) -> tuple[int, bytes]:
        """The exit code and stderr of a replay that got the signal after one email, when its session has ended."""
        replayed = dead.books.statuses()["pending"]
        with offline.started("dlq", "replay", *words, "--rate", "0.01") as process:
            wait_until(lambda: process.poll() is not None or dead.books.statuses()["pending"] > replayed)
            process.send_signal(number)
            _, stderr = process.communicate(timeout=DEADLINE_SECONDS)
        # PostgreSQL notices a moment later that the command has ended.
        wait_until(lambda: offline("dlq", "replays", "--json").json["replays"][0]["state"] == "interrupted")
        return process.returncode, stderr

    dead.create(3)

    stopped(signal.SIGKILL, "--all", *WHY, "--yes")
    code, stderr = stopped(signal.SIGINT, "--resume", "1")
    resumed = offline("dlq", "replay", "--resume", "1", "--rate", "0", "--json")

    assert code == 130
    assert b"To continue: dispatcher dlq replay --resume 1" in stderr
    assert b"Traceback" not in stderr
    assert (resumed.code, resumed.json["replayed"], resumed.json["state"]) == (0, 3, "done")


def test_a_terminal_shows_a_question_and_a_progress_bar_and_emails_that_fail_after_the_question_are_not_replayed(
    offline: CommandLine, dead: DeadEmails
) -> None:
    dead.create(2, last_error="SES is away.")
    later: list[UUID] = []

    def answer(_: subprocess.Popen[bytes]) -> bytes:
        later.extend(dead.create(3, last_error="SES is away."))
        return b"y\n"

    words = ("dlq", "replay", "--text", "SES", *WHY)
    ended = offline.on_terminal(*words, when=lambda screen: b"Replay 2 emails?" in screen, then=answer)

    assert ended.code == 0
    assert "2/2" in ended.stdout
    assert dead.books.statuses() == {"pending": 2, "failed": 3}
    assert {dead.books.status(email_id) for email_id in later} == {"failed"}


def test_poison_is_listed_shown_exported_repaired_and_discarded(prepared: CommandLine, dead_emails: DeadEmails) -> None:
    (email_id,) = dead_emails.books.enqueue(1)
    for body in (b"\x1b[2Jgarbage", b"more"):
        asyncio.run(dead_emails.publish(body))
    repaired = prepared.folder / "repaired.json"
    repaired.write_text(f'{{"v": 1, "email_id": "{email_id}", "message_key": "{dead_emails.books.key(email_id)}"}}')

    first, second = prepared("dlq", "list", "--poison", "--json").json["poison"]
    shown = prepared("dlq", "show", first["poison_id"], "--hex", "--export", "exported")
    broken = prepared("dlq", "replay", second["poison_id"], "--body", "exported", *WHY)
    fixed = prepared("dlq", "replay", second["poison_id"], "--body", str(repaired), *WHY)
    asked = prepared("dlq", "discard", first["poison_id"], *WHY)
    dry = prepared("dlq", "discard", first["poison_id"], "--dry-run", "--yes")
    limited = prepared("dlq", "list", "--poison", "--json", "--limit", "1")
    discarded = prepared("dlq", "discard", first["poison_id"], *WHY, "--yes", "--json")

    assert first["beginning"] == "\\x1b[2Jgarbage"
    assert "1b 5b 32 4a" in shown.stdout
    assert (prepared.folder / "exported").read_bytes() == b"\x1b[2Jgarbage"
    assert (broken.code, fixed.code, asked.code, discarded.code) == (1, 0, 2, 0)
    assert (dry.code, "Nothing was changed." in dry.stderr) == (0, True)
    assert [each["poison_id"] for each in limited.json["poison"]] == [first["poison_id"]]
    assert discarded.json == {"discarded": 1}
    assert prepared("dlq", "list", "--poison", "--json").json == {"poison": [], "total": 0}
    (taken,) = asyncio.run(dead_emails.rabbit.take_all(dead_emails.topology.queue, 1))
    assert taken.body == repaired.read_bytes()


def test_reconcile_exits_with_3_until_differences_are_repaired(prepared: CommandLine, dead_emails: DeadEmails) -> None:
    dead_emails.create(2)

    document = prepared("dlq", "reconcile")
    fixed = prepared("dlq", "reconcile", "--fix", *WHY, "--json")

    assert (document.code, fixed.code) == (3, 0)
    assert "2 missing" in document.stderr
    assert (len(fixed.json["missing"]), fixed.json["fixed"]) == (2, True)
    assert prepared("dlq", "reconcile").code == 0


def test_show_names_message_id_and_recipients_that_refused_or_have_it(offline: CommandLine, dead: DeadEmails) -> None:
    words = "refused recipients: 2 (550 5.1.1); 250 Ok"
    (email_id,) = dead.create(status="sent", error_type=None, last_error=words, provider_message_id="4fQ8")
    dead.books.connection.execute(
        "insert into email_attempt values"
        " (%s, 1, 'host:w0', 'smtp', now(), now(), 'deferred', 'throttled', 'slow', '451'),"
        " (%s, 2, 'host:w0', 'smtp', now(), now(), 'accepted', null, %s, null)",
        [email_id, email_id, words],
    )
    partly: dict[str, Any] = {"error_type": "partly_delivered", "last_error": "delivered to 2 of 3"}
    (in_part,) = dead.create(**partly, recipient_outcomes='{"1": null, "2": null}')

    shown = offline("dlq", "show", str(email_id), "--no-queue").stdout
    partial = offline("dlq", "show", str(in_part), "--no-queue").stdout
    document = offline("show", str(email_id), "--no-queue", "--json").json
    (listed,) = offline("find", "--status", "sent", "--json").json["emails"]

    for found in (document, document["attempts"][1], listed):
        assert (found["error"], found["answer"]) == (None, words)
    first = document["attempts"][0]
    assert (first["error"], first["answer"], document["last_error"]) == ("slow", None, None)
    assert "1970" not in orjson.dumps(document).decode()
    fields = shown.partition("\nattempts (by the clock of the sending host)\n")[0]
    assert "recipients 2 (550 5.1.1), in the order To, Cc, Bcc: the provider refused these" in fields
    assert re.search(rf"^answer +{re.escape(words)}$", fields, re.MULTILINE)
    assert "last error" not in fields
    assert f"<{email_id}@…>" in fields
    assert "4fQ8" in fields
    assert re.search(r"^delivered to +recipients 1-2, in the order To, Cc, Bcc", partial, re.MULTILINE)
    assert "recipient_outcomes" not in partial
