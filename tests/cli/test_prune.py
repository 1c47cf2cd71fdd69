"""`dispatcher prune`: what it says; what it does is in tests/store/test_retention.py."""

from __future__ import annotations

import psycopg
import pytest

from dispatcher.store.retention import KINDS
from tests.cli.commandline import CommandLine


@pytest.fixture
def prepared(prepared: CommandLine) -> CommandLine:
    return prepared.at_hand


OLD_WEEK = "select email_partitions_make(clock_timestamp() - interval '100 days', 0)"


def test_it_names_what_it_would_drop_and_drops_it(prepared: CommandLine) -> None:
    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"], autocommit=True) as connection:
        names = {name for (name,) in connection.execute(OLD_WEEK) if "content" in name or "attachment" in name}

    would = prepared("prune", "--dry-run", "--json").json["partitions"]
    done = prepared("prune", "--json").json

    assert set(would) == names
    assert set(done["partitions"]) == names
    assert {name: done[name] for name in KINDS} == dict.fromkeys(KINDS, 0)
    assert prepared("prune", "--dry-run").stdout == "no partition is old enough\n"


def test_content_cannot_outlive_its_email(bare: CommandLine) -> None:
    commandline = bare.having(
        DISPATCHER_DATABASE_URL="postgresql://nobody@127.0.0.1:1/x",
        DISPATCHER_RETAIN_EMAILS_DAYS="10",
        DISPATCHER_RETAIN_CONTENT_DAYS="20",
    )

    ended = commandline("prune")

    assert ended.code == 78
    assert "DISPATCHER_RETAIN_CONTENT_DAYS" in ended.stderr


def test_what_fails_is_named_and_the_rest_is_done(prepared: CommandLine) -> None:
    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"], autocommit=True) as connection:
        (stuck,) = [name for (name,) in connection.execute(OLD_WEEK) if "attachment" in name]
        connection.execute(f"create view report as table {stuck}".encode())

    ended = prepared("prune", "--json")

    assert ended.code == 3
    assert list(ended.json["failed"]) == ["email_attachment"]
    assert len(ended.json["partitions"]) == 1
    assert "email_attachment not pruned: " in ended.stderr
