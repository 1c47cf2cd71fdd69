"""Tests the behaviour that all commands share: imports, settings, exit codes, closed pipes, tables."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from dispatcher.cli.table import Styled, Table, columns_of, side_by_side
from dispatcher.version import VERSION
from tests.cli.commandline import PROGRAM, CommandLine

NEEDLESS = {"rich", "uvloop", "structlog", "psycopg_pool", "dotenv"}
NEEDLESS_FOR_DLQ = NEEDLESS | {"pika", "boto3", "difflib"}
NEEDLESS_FOR_DLQ |= {f"dispatcher.{name}" for name in ("domain.address", "domain.scrub", "ops.poison")}
NEEDLESS_FOR_STATUS = NEEDLESS | {"prometheus_client", "h11", "dispatcher.store.outbox", "dispatcher.store.webhooks"}
NEEDLESS_FOR_FIND = NEEDLESS | {"pika", "prometheus_client", "multiprocessing", "boto3", "pydantic", "starlette"}
NEEDLESS_FOR_FIND |= {"idna", "h11"}
NEEDLESS_FOR_FIND |= {f"dispatcher.{name}" for name in ("broker", "ops.acts", "domain.waiting", "store.emails")}


def _python(script: str, commandline: CommandLine) -> subprocess.CompletedProcess[str]:
    environment = commandline.whole_environment
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "needless"),
    [
        (["--help"], NEEDLESS | {"pika", "psycopg"}),
        (["dlq", "list", "--by", "error_type"], NEEDLESS_FOR_DLQ),
        (["dlq", "show", "0198c2f4-0000-7000-8000-000000000000"], NEEDLESS_FOR_DLQ),
        (["status"], NEEDLESS_FOR_STATUS),
        (["find", "--to", "ann@example.org"], NEEDLESS_FOR_FIND),
    ],
    ids=["help", "dlq list", "dlq show", "status", "find"],
)
def test_commands_import_only_what_they_need(settled: CommandLine, words: list[str], needless: set[str]) -> None:
    script = (
        f"import sys; from dispatcher.cli.main import main; main({words})\n"
        "from dispatcher.config import plugins\n"
        f"print({needless} & sys.modules.keys(), 'psycopg' in sys.modules, plugins.installed.cache_info().currsize)\n"
    )

    done = _python(script, settled)

    assert done.stdout.endswith(f"set() {words != ['--help']} 0\n"), done.stdout + done.stderr


def test_run_imports_before_the_fork_what_its_processes_need_and_nothing_else(settled: CommandLine) -> None:
    """The provider is `capture`. The script replaces the first fork, and so sees what the processes would share."""
    script = (
        "import gc, os, sys\n"
        "def fork():\n"
        "    needless = {'boto3', 'starlette', 'sendgrid', 'aiosmtplib', 'cryptography', 'dispatcher.cli.table'}\n"
        "    needless |= {'dispatcher.events.bounce_parser', 'dispatcher.events.sqs'}\n"
        "    needless |= {f'dispatcher.providers.{name}' for name in ('resend', 'sendgrid', 'ses', 'smtp', 'twilio')}\n"
        "    needed = {'structlog', 'pika', 'uvloop', 'h11', 'psycopg_pool', 'prometheus_client.mmap_dict'}\n"
        "    loaded = sys.modules.keys()\n"
        "    print(sorted(needless & loaded), sorted(needed - loaded), gc.isenabled(), flush=True)\n"
        "    os._exit(0)\n"
        "os.fork = fork\n"
        "from dispatcher.cli.main import main; main(['run'])"
    )

    done = _python(script, settled.having(DISPATCHER_METRICS_ADDRESS="off"))

    assert done.stdout.endswith("[] [] True\n"), done.stdout + done.stderr


def test_version_is_printed(bare: CommandLine) -> None:
    assert bare("--version").stdout == f"dispatcher {VERSION}\n"


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("run", {"DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL", "DISPATCHER_PROVIDERS"}),
        ("init", {"DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL"}),
        ("status", {"DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL"}),
        ("config", {"DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL", "DISPATCHER_PROVIDERS"}),
        ("enqueue --file -", {"DISPATCHER_DATABASE_URL"}),
    ],
)
def test_all_missing_settings_are_named_one_per_line(bare: CommandLine, words: str, needed: set[str]) -> None:
    ended = bare(*words.split())

    assert ended.code == 78
    mistakes = ended.refusals if words == "run" else ended.stderr.splitlines()
    assert {line.partition(" is not set")[0] for line in mistakes} == needed


def test_an_error_is_one_message_with_a_remedy(settled: CommandLine, unprepared: CommandLine) -> None:
    away = settled.having(DISPATCHER_DATABASE_URL="postgresql://u:secret@127.0.0.1:1/x")("status")
    without_tables = unprepared("status")

    assert (away.code, without_tables.code) == (1, 1)
    assert away.stderr.startswith("dispatcher: PostgreSQL is not available")
    assert "Traceback" not in away.stderr
    assert "secret" not in away.stderr
    remedy = "Run `dispatcher init`, or set DISPATCHER_DATABASE_SCHEMA if the tables are in another schema."
    assert remedy in without_tables.stderr


@pytest.mark.parametrize("command", ["config", "--help"])
def test_a_closed_pipe_is_not_an_error(settled: CommandLine, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with settled.started(command, stdout=writer) as process:
        os.close(writer)
        _, stderr = process.communicate()

    assert stderr == b""
    assert process.returncode in ((0, 1) if command == "--help" else (0,))


@pytest.mark.parametrize("words", ["status --json", "--help"])
def test_a_full_disk_is_an_error(settled: CommandLine, words: str) -> None:
    with Path("/dev/full").open("wb") as full, settled.started(*words.split(), stdout=full) as process:
        _, stderr = process.communicate()

    assert process.returncode == 1
    assert stderr == b"dispatcher: stdout cannot be written: No space left on device.\n"


def test_commands_work_with_a_closed_stdout(settled: CommandLine) -> None:
    ended = replace(settled, program=("sh", "-c", '"$@" >&-', "sh", *PROGRAM), needs_process=True)("config")

    assert (ended.code, ended.stderr) == (0, "")


def table(words: str = "550 no such user") -> Table:
    made = Table("email", "count", "words", right=[1])
    made.add("0198c2f4-0000", 7, words)
    made.add("0198c2f4-0001", 1000, "-")
    return made


HEADING = ["email           count   words", "─" * 40]
RECORDS = [
    "email   0198c2f4-0000",
    "count   7",
    "words   550 no such user",
    "",
    "email   0198c2f4-0001",
    "count   1000",
]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, [*HEADING, "0198c2f4-0000       7   550 no such user", "0198c2f4-0001    1000   -"]),
        (36, ["0198c2f4-0000       7   550 no such", "                        user", "0198c2f4-0001    1000   -"]),
        (25, RECORDS),  # too narrow for the columns: rows become records
        (20, ["email   0198c2f4-0000"]),  # a word is not broken
    ],
)
def test_columns_are_aligned_and_cells_are_wrapped_on_a_narrow_terminal(width: int | None, lines: list[str]) -> None:
    shown = table().lines(width) if width else table().lines()

    assert [line for line in shown if line in lines] == lines
    assert width in (20, 36) or shown == lines


def test_wide_characters_take_two_columns_and_control_characters_are_replaced() -> None:
    assert table("日本 x").lines(29)[2:4] == ["0198c2f4-0000       7   日本", "                        x"]
    assert table("\x1b[31mred\n").lines()[2].endswith("\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}")


def test_a_very_long_text_is_cut_and_the_words_of_the_fold_column_are_broken() -> None:
    assert max(map(len, table("x" * 1_000_000).lines())) < 5000
    made = Table("variable", "value", fold=1)
    made.add("DISPATCHER_AMQP_URL", "amqp://" + "x" * 60)
    assert max(map(columns_of, made.lines(60))) <= 60


def test_without_a_heading_a_table_has_only_rows_gaps_and_styles_that_add_no_width() -> None:
    made = Table()
    made.add(Styled("✗", "red"), "webhook", style="bold")
    made.add(None, datetime(2026, 1, 2, 3, 4, 5).astimezone())
    made.add_gap()
    made.add("", "later")

    assert made.lines() == ["✗   webhook", "-   2026-01-02 03:04:05", "", "    later"]
    assert made.lines(coloured=True)[0] == "\x1b[31m✗\x1b[0m   \x1b[1mwebhook\x1b[0m"


def test_tables_are_side_by_side_if_they_fit_and_otherwise_one_below_the_other() -> None:
    left, right = Table(), Table()
    left.add("sent", 1)
    left.add("failed", 2)
    right.add("worker")

    assert side_by_side([left, right], 80, coloured=False) == ["sent     1    worker", "failed   2"]
    assert side_by_side([left, right], 12, coloured=False) == ["sent     1", "failed   2", "", "worker"]
