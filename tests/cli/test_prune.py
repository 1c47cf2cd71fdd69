"""The output of `dispatcher prune`. tests/store/test_retention.py tests which rows the command deletes."""

from __future__ import annotations

import psycopg
import pytest

from dispatcher.store.retention import KINDS
from tests.cli.commandline import CommandLine


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A database that only one test uses, because pruning drops partitions."""
    return own_database_url


@pytest.fixture
def prepared(prepared: CommandLine) -> CommandLine:
    return prepared.without_process


OLD_WEEK = "select email_partitions_make(clock_timestamp() - interval '100 days', 0)"


def test_dry_run_names_the_partitions_that_prune_then_drops(prepared: CommandLine) -> None:
    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"], autocommit=True) as connection:
        names = {name for (name,) in connection.execute(OLD_WEEK) if "content" in name or "attachment" in name}

    would = prepared("prune", "--dry-run", "--json").json["partitions"]
    done = prepared("prune", "--json").json

    assert set(would) == names
    assert set(done["partitions"]) == names
    assert {name: done[name] for name in KINDS} == dict.fromkeys(KINDS, 0)
    assert prepared("prune", "--dry-run").stdout == "no partition is old enough\n"


def test_keeping_content_longer_than_its_email_is_a_configuration_error(bare: CommandLine) -> None:
    commandline = bare.having(
        DISPATCHER_DATABASE_URL="postgresql://nobody@127.0.0.1:1/x",
        DISPATCHER_RETAIN_EMAILS_DAYS="10",
        DISPATCHER_RETAIN_CONTENT_DAYS="20",
    )

    ended = commandline("prune")

    assert ended.code == 78
    assert "DISPATCHER_RETAIN_CONTENT_DAYS" in ended.stderr


def test_a_failed_part_is_named_and_the_others_are_done(prepared: CommandLine) -> None:
    with psycopg.connect(prepared.environment["DISPATCHER_DATABASE_URL"], autocommit=True) as connection:
        (stuck,) = [name for (name,) in connection.execute(OLD_WEEK) if "attachment" in name]
        connection.execute(f"create view report as table {stuck}".encode())

    ended = prepared("prune", "--json")

    assert ended.code == 3
    assert list(ended.json["failed"]) == ["email_attachment"]
    assert len(ended.json["partitions"]) == 1
    assert "email_attachment was not pruned: " in ended.stderr
