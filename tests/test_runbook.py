"""The runbook's commands and options exist, its links work, and its restore procedure sends no email twice."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from pathlib import Path
from uuid import UUID

import click
import psycopg
import pytest

from dispatcher.broker.connection import open_connection
from dispatcher.broker.topology import Topology
from dispatcher.cli.main import dispatcher
from dispatcher.dev.servers import Servers
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine, settings_for
from tests.store.books import Books
from tests.waiting import wait_until

RUNBOOK = (Path(__file__).parent.parent / "docs" / "runbook.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
STAND_INS = {"ID": "0198c2f4-0000-7000-8000-000000000000", "KEY": "order-17-receipt"}


def commands() -> list[str]:
    lines = [line.strip() for block in FENCED.finditer(RUNBOOK) for line in block["text"].splitlines()]
    found = [line.partition(" #")[0].strip() for line in lines]
    found += [f"{each[1]} ID" for line in found if (each := re.fullmatch(r"xargs -n \d+ (dispatcher .+) < \S+", line))]
    found += re.findall(r"`(dispatcher [^`…]+)`", FENCED.sub("", RUNBOOK))
    return sorted({line for line in found if line.startswith("dispatcher ")})


def parse(line: str, tmp_path: Path) -> None:
    words = [STAND_INS.get(word, word) for word in shlex.split(line)[1:]]
    words = [str(tmp_path / word) if word.endswith(".json") else word for word in words]
    command: click.Command = dispatcher
    context = click.Context(command, info_name="dispatcher")
    while isinstance(command, click.Group) and words:
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
        context = click.Context(command, parent=context, info_name=command.name)
    command.make_context(command.name, words, parent=context.parent)


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_runbook_exists(line: str, tmp_path: Path) -> None:
    (tmp_path / "repaired.json").write_text("{}")

    parse(line, tmp_path)


def test_links_lead_to_chapters() -> None:
    chapters = re.findall(r"^## (.+)$", RUNBOOK, re.MULTILINE)
    links = re.findall(r"\]\(#([^)]+)\)", RUNBOOK)

    assert links
    anchors = {re.sub(r"[^a-z0-9 -]", "", chapter.lower()).replace(" ", "-") for chapter in chapters}
    assert set(links) <= anchors


RESTORED = RUNBOOK.partition("\n## PostgreSQL is restored from a backup\n")[2]
STEPS = re.split(r"^\d\. ", RESTORED, flags=re.MULTILINE)[1:]


def statement(text: str, verb: str) -> bytes:
    statements = [block["text"].strip() for block in FENCED.finditer(text) if block["language"] == "sql"]
    (found,) = [each for each in statements if each.startswith(verb)]
    return found.encode()


def test_the_statement_holds_all_emails_of_a_restored_backup(tables_url: str) -> None:
    with psycopg.connect(tables_url, autocommit=True) as connection:
        connection.execute(
            "insert into email_log (email_id, tenant_id, message_key, status, publish_due_at)"
            " select gen_random_uuid(), 't', status, status, now()"
            " from unnest(array['pending', 'sending', 'sent', 'failed', 'held', 'cancelled']) as status"
        )
        connection.execute(
            "insert into email_log (email_id, tenant_id, message_key, status, wait_until)"
            " select gen_random_uuid(), 't', key, 'waiting', now() + wait"
            " from (values ('woken', interval '-1 hour'), ('later', interval '1 hour')) as t (key, wait)"
        )
        connection.execute(
            "insert into email_replay (state, source, selection, include_held, actor, reason)"
            " select state, 'filter', '{}', true, 'ann', 'y' from unnest(array['running', 'stopped', 'done']) as state"
        )

        connection.execute(statement(RUNBOOK, "update"))

        rows = connection.execute(
            "select message_key, status from email_log where dead_letter_due_at is not null and publish_due_at is null "
            "and error_type = 'outcome_unknown' and was_uncertain and locked_by is null and locked_until < now()"
        ).fetchall()
        uncertain = connection.execute("select message_key, status from email_log where was_uncertain").fetchall()
        states = connection.execute("select distinct state from email_replay").fetchall()
    assert sorted(rows) == [("pending", "held"), ("sending", "held"), ("woken", "held")]
    assert sorted(uncertain) == [("failed", "failed"), *sorted(rows)]
    assert states == [("done",)]


@pytest.fixture
def restored(tmp_path: Path, servers: Servers, database_url: str, topology: Topology) -> CommandLine:
    """`dispatcher` after a restore of the tables, with the capture provider, which writes emails to files."""
    host = {"DISPATCHER_WORKERS": "1", "DISPATCHER_RUN_DIR": str(tmp_path / "run"), "DISPATCHER_METRICS_ADDRESS": "off"}
    return CommandLine(tmp_path, settings_for(topology, servers, database_url) | host, needs_process=False)


def sent(commandline: CommandLine) -> set[UUID]:
    """The ids of the sent emails; asserts that no email was sent twice."""
    left = [UUID(file.name.partition(".")[0]) for file in commandline.folder.glob("mail/new/*.eml")]
    assert len(left) == len(set(left))
    return set(left)


async def purge(servers: Servers, queue: str) -> None:
    async with await open_connection(servers.amqp_url, name="test") as connection:
        channel = await connection.open_channel()
        await channel.call(channel.raw.queue_purge, queue=queue)


def test_after_a_restore_emails_that_may_have_been_sent_are_sent_only_if_an_operator_says_so(
    restored: CommandLine, servers: Servers, topology: Topology, connection: psycopg.Connection
) -> None:
    """Three things happened after the backup: the application enqueued `again`, which was sent; `waiting` was sent; and
    `failed` was replayed and sent."""
    books = Books(connection)
    waiting, failed = books.enqueue(2)
    books.change(failed, status="failed", error_type="refused", publish_due_at=None)
    before, start, _after = STEPS[:-2], STEPS[-2], STEPS[-1]
    assert start.startswith("Start `dispatcher run`")
    enqueued_again: list[UUID] = []

    for step in before:
        if "**the applications enqueue again**" in step:
            enqueued_again.append(books.enqueue_one())
        for block in FENCED.finditer(step):
            if block["language"] == "sql":
                connection.execute(block["text"].encode())
            elif "rabbitmqctl purge_queue" in block["text"]:
                asyncio.run(purge(servers, topology.queue))
            else:
                assert restored(*shlex.split(block["text"])[1:]).code == 0

    (again,) = enqueued_again
    why = ("--reason", "restored from a backup")
    with restored.started("run") as run:
        new = books.enqueue_one()
        replayed = restored("dlq", "replay", "--error-type", "refused", "--yes", *why)
        wait_until(lambda: books.status(new) == "sent", DEADLINE_SECONDS)

        assert sent(restored) == {new}
        assert replayed.code == 1
        assert [books.status(each) for each in (waiting, again, failed)] == ["held", "held", "failed"]
        listed = connection.execute(statement(RESTORED, "select")).fetchall()  # what an operator confirms or releases
        assert {row[0] for row in listed} == {waiting, again, failed}

        assert restored("held", "confirm", str(again), *why).code == 0
        assert restored("dlq", "replay", "--status", "held", "--held", "--yes", *why).code == 0
        assert restored("dlq", "replay", "--error-type", "refused", "--held", "--yes", *why).code == 0
        wait_until(lambda: books.statuses() == {"sent": 4}, DEADLINE_SECONDS)
        assert sent(restored) == {new, waiting, failed}
        run.send_signal(signal.SIGTERM)
        assert run.wait(DEADLINE_SECONDS) == 0
