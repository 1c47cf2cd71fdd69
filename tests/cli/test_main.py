"""Tests the behaviour that all commands share: help, usage errors, exit codes, closed pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dispatcher.cli.main import COMMANDS, dispatcher
from dispatcher.version import VERSION
from tests.cli.commandline import PROGRAM, CommandLine


def test_help_lists_every_command_with_its_summary(bare: CommandLine) -> None:
    ended = bare("--help")

    assert ended.code == 0
    for name, (_, summary) in COMMANDS.items():
        assert name in ended.stdout
        assert summary in " ".join(ended.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(dispatcher, [name, "--help"])

    assert shown.exit_code == 0
    assert "Example" in shown.output
    assert f"dispatcher {name}" in shown.output


def test_help_imports_no_command_and_not_rich(bare: CommandLine) -> None:
    script = (
        "import sys; from dispatcher.cli.main import main; main(['--help'])\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('rich', 'pika', 'uvloop', 'structlog')]\n"
        "assert not loaded, loaded"
    )

    done = subprocess.run([sys.executable, "-c", script], env=bare.whole_environment, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_no_summary_in_a_list_of_commands_is_truncated(name: str) -> None:
    shown = CliRunner().invoke(dispatcher, [name, "--help"])

    assert "..." not in shown.output.partition("Commands:")[2]


NEEDLESS = {"rich", "uvloop", "structlog", "psycopg_pool"}
NEEDLESS_FOR_DLQ = (
    NEEDLESS
    | {"pika", "boto3", "difflib"}
    | {f"dispatcher.{name}" for name in ("domain.address", "domain.scrub", "ops.poison")}
)
NEEDLESS_FOR_STATUS = NEEDLESS | {"prometheus_client", "h11", "dispatcher.store.outbox", "dispatcher.store.webhooks"}


@pytest.mark.parametrize(
    ("words", "needless"),
    [
        (["dlq", "list", "--by", "error_type"], NEEDLESS_FOR_DLQ),
        (["dlq", "show", "0198c2f4-0000-7000-8000-000000000000"], NEEDLESS_FOR_DLQ),
        (["status"], NEEDLESS_FOR_STATUS),
    ],
    ids=["dlq list", "dlq show", "status"],
)
def test_commands_import_only_what_they_need(settled: CommandLine, words: list[str], needless: set[str]) -> None:
    script = (
        f"import sys; from dispatcher.cli.main import main; main({words})\n"
        f"needless = {needless}\n"
        "assert 'psycopg' in sys.modules\n"
        "assert not needless & sys.modules.keys(), needless & sys.modules.keys()"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], env=settled.whole_environment, capture_output=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_find_imports_only_what_it_needs(settled: CommandLine) -> None:
    script = (
        "import sys; from dispatcher.cli.main import main; main(['find', '--to', 'ann@example.org'])\n"
        "from dispatcher.config import plugins\n"
        "needless = {'rich', 'pika', 'uvloop', 'structlog', 'prometheus_client', 'psycopg_pool', 'multiprocessing'}\n"
        "needless |= {'boto3', 'pydantic', 'starlette', 'dotenv', 'idna', 'h11', 'dispatcher.broker'}\n"
        "needless |= {'dispatcher.ops.acts', 'dispatcher.domain.waiting', 'dispatcher.store.emails'}\n"
        "assert 'psycopg' in sys.modules\n"
        "assert not needless & sys.modules.keys(), needless & sys.modules.keys()\n"
        "assert not plugins.installed.cache_info().currsize, 'installed packages were searched for providers'"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], env=settled.whole_environment, capture_output=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_run_imports_before_the_fork_what_its_processes_need_and_nothing_else(prepared: CommandLine) -> None:
    """The provider is `capture`. The script replaces the first fork, and so sees what the processes would share."""
    assert prepared("init").code == 0
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

    done = subprocess.run(
        [sys.executable, "-c", script], env=prepared.whole_environment, capture_output=True, text=True, check=False
    )

    assert done.stdout.endswith("[] [] True\n"), done.stdout + done.stderr


def test_version_is_printed(bare: CommandLine) -> None:
    ended = bare("--version")

    assert (ended.code, ended.stdout) == (0, f"dispatcher {VERSION}\n")


def test_unknown_command_is_a_usage_error_that_suggests_a_similar_one(bare: CommandLine) -> None:
    ended = bare("doctro")

    assert ended.code == 2
    assert "Did you mean 'doctor'?" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["run"], {"DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL", "DISPATCHER_PROVIDERS"}),
        (["init"], {"DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL"}),
        (["status"], {"DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL"}),
        (["config"], {"DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL", "DISPATCHER_PROVIDERS"}),
        (["enqueue", "--file", "-"], {"DISPATCHER_DATABASE_URL"}),
    ],
)
def test_all_missing_settings_are_named_one_per_line(bare: CommandLine, arguments: list[str], needed: set[str]) -> None:
    ended = bare(*arguments)

    assert ended.code == 78
    mistakes = ended.refusals if arguments == ["run"] else ended.stderr.splitlines()
    assert {line.partition(" is not set")[0] for line in mistakes} == needed


def test_all_mistakes_are_reported_at_once(bare: CommandLine) -> None:
    mistaken = bare.having(
        DISPATCHER_DATABASE_URL="http://db", DISPATCHER_WORKERS="many", DISPATCHER_PROVIDERS="pigeon"
    )

    ended = mistaken("run")

    assert ended.code == 78
    assert [line.split()[0] for line in ended.refusals] == [
        "DISPATCHER_DATABASE_URL",
        "DISPATCHER_WORKERS",
        "DISPATCHER_PROVIDERS",
        "DISPATCHER_AMQP_URL",
    ]


def test_an_error_is_one_message_without_a_stack_trace(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_DATABASE_URL="postgresql://u:secret@127.0.0.1:1/x")("status")

    assert ended.code == 1
    assert ended.stderr.startswith("dispatcher: PostgreSQL is not available")
    assert "Traceback" not in ended.stderr
    assert "secret" not in ended.stderr


def test_the_error_for_missing_tables_has_a_remedy(unprepared: CommandLine) -> None:
    ended = unprepared("status")

    assert ended.code == 1
    remedy = "Run `dispatcher init`, or set DISPATCHER_DATABASE_SCHEMA if the tables are in another schema."
    assert remedy in ended.stderr


@pytest.mark.parametrize("command", ["config", "--help", "status"])
def test_a_closed_pipe_is_not_an_error(settled: CommandLine, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(
        [*PROGRAM, command],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=settled.whole_environment,
        cwd=settled.folder,
        check=False,
    )
    os.close(writer)

    assert done.stderr == b""
    assert done.returncode in ((0, 1) if command == "--help" else (0,))


@pytest.mark.parametrize("words", ["status --json", "--help", "dlq list --help", "--version"])
def test_a_full_disk_is_an_error(settled: CommandLine, words: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*PROGRAM, *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            env=settled.whole_environment,
            cwd=settled.folder,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr == b"dispatcher: stdout cannot be written: No space left on device.\n"


def test_commands_work_with_a_closed_stdout(settled: CommandLine) -> None:
    shell = ["/bin/sh", "-c", '"$@" >&-', "sh", *PROGRAM, "config"]

    done = subprocess.run(shell, capture_output=True, env=settled.whole_environment, cwd=settled.folder, check=False)

    assert (done.returncode, done.stderr) == (0, b"")


def test_commands_work_with_a_stdout_that_takes_only_ascii(settled: CommandLine) -> None:
    ended = settled.having(PYTHONIOENCODING="ascii")("doctor")

    assert ended.code == 0
    assert ended.stdout.startswith("?")
