"""The runbook is read at night: every command in it is one that there is, with options that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import psycopg
import pytest

from dispatcher.cli.main import dispatcher

RUNBOOK = (Path(__file__).parent.parent / "docs" / "runbook.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
STAND_INS = {"ID": "0198c2f4-0000-7000-8000-000000000000", "KEY": "order-17-receipt"}


def commands() -> list[str]:
    """Every `dispatcher …` of the runbook, in blocks and in sentences, without comments."""
    lines = [line.strip() for block in FENCED.finditer(RUNBOOK) for line in block["text"].splitlines()]
    found = [line.partition(" #")[0].strip() for line in lines]
    found += re.findall(r"`(dispatcher [^`…]+)`", FENCED.sub("", RUNBOOK))
    return sorted({line for line in found if line.startswith("dispatcher ")})


def parse(line: str, tmp_path: Path) -> None:
    """Takes a command apart as `dispatcher` does, down to the command that it names, and runs nothing."""
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
def test_a_command_of_the_runbook_is_one_that_there_is(line: str, tmp_path: Path) -> None:
    (tmp_path / "repaired.json").write_text("{}")

    parse(line, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "dispatcher dlq lsit",
        "dispatcher dlq list --by nothing",
        "dispatcher status --jsno",
        "dispatcher held confirm ID",
    ],
)
def test_a_command_that_there_is_not_is_seen(line: str, tmp_path: Path) -> None:
    with pytest.raises(click.ClickException):
        parse(line, tmp_path)


def test_every_event_that_it_is_for_has_its_chapter() -> None:
    chapters = re.findall(r"^## (.+)$", RUNBOOK, re.MULTILINE)
    links = re.findall(r"\]\(#([^)]+)\)", RUNBOOK)

    assert len(chapters) == 9
    anchors = {re.sub(r"[^a-z0-9 -]", "", chapter.lower()).replace(" ", "-") for chapter in chapters}
    assert set(links) <= anchors


def test_what_was_restored_from_a_backup_is_held_by_the_statement_that_it_gives(tables_url: str) -> None:
    told = [block["text"] for block in FENCED.finditer(RUNBOOK) if block["language"] == "sql"]
    (statement,) = [text for text in told if text.lstrip().startswith("update")]
    statuses = ("pending", "sending", "sent", "failed", "held")
    with psycopg.connect(tables_url, autocommit=True) as connection:
        for status in statuses:
            connection.execute(
                "insert into email_log (email_id, tenant_id, message_key, status, publish_due_at) "
                "values (gen_random_uuid(), 't', %s, %s, now())",
                (status, status),
            )

        connection.execute(statement.encode())

        rows = connection.execute(
            "select message_key, status from email_log where dead_letter_due_at is not null and publish_due_at is null "
            "and error_type = 'outcome_unknown' and was_uncertain and locked_by is null and locked_until < now()"
        ).fetchall()
    assert sorted(rows) == [("pending", "held"), ("sending", "held")]
