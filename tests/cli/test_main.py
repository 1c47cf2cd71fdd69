"""Tests the behaviour that all commands share: help, imports, settings, exit codes, closed pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dispatcher.cli.main import COMMANDS
from dispatcher.version import VERSION
from tests.cli.commandline import PROGRAM, CommandLine

NEEDLESS = {"rich", "uvloop", "structlog", "psycopg_pool", "dotenv"}
NEEDLESS_FOR_DLQ = NEEDLESS | {"pika", "boto3", "difflib"}
NEEDLESS_FOR_DLQ |= {f"dispatcher.{name}" for name in ("domain.address", "domain.scrub", "ops.poison")}
NEEDLESS_FOR_STATUS = NEEDLESS | {"prometheus_client", "h11", "dispatcher.store.outbox", "dispatcher.store.webhooks"}
NEEDLESS_FOR_FIND = NEEDLESS | {
    "pika",
    "prometheus_client",
    "multiprocessing",
    "boto3",
    "pydantic",
    "starlette",
    "idna",
}
NEEDLESS_FOR_FIND |= {"h11", "dispatcher.broker", "dispatcher.ops.acts", "dispatcher.domain.waiting"}
NEEDLESS_FOR_FIND |= {"dispatcher.store.emails"}


def _python(script: str, commandline: CommandLine) -> subprocess.CompletedProcess[str]:
    environment = commandline.whole_environment
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_an_example_or_all_commands_and_cuts_no_summary(bare: CommandLine, name: str) -> None:
    shown = bare(*name.split(), "--help")

    assert shown.code == 0
    words = ["Example", f"dispatcher {name}"] if name else [*COMMANDS, *(summary for _, summary in COMMANDS.values())]
    assert [each for each in words if each not in " ".join(shown.stdout.split())] == []
    assert "..." not in shown.stdout.partition("Commands:")[2]


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
        f"needless, has_connected = {needless}, {words != ['--help']}\n"
        "assert not has_connected or 'psycopg' in sys.modules\n"
        "assert not needless & sys.modules.keys(), needless & sys.modules.keys()\n"
        "assert not plugins.installed.cache_info().currsize, 'installed packages were searched for providers'"
    )

    done = _python(script, settled)

    assert done.returncode == 0, done.stderr


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
    ended = bare("--version")

    assert (ended.code, ended.stdout) == (0, f"dispatcher {VERSION}\n")


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


def test_an_error_is_one_message_without_a_stack_trace_and_has_a_remedy(
    settled: CommandLine, unprepared: CommandLine
) -> None:
    away = settled.having(DISPATCHER_DATABASE_URL="postgresql://u:secret@127.0.0.1:1/x")("status")
    without_tables = unprepared("status")

    assert (away.code, without_tables.code) == (1, 1)
    assert away.stderr.startswith("dispatcher: PostgreSQL is not available")
    assert "Traceback" not in away.stderr
    assert "secret" not in away.stderr
    remedy = "Run `dispatcher init`, or set DISPATCHER_DATABASE_SCHEMA if the tables are in another schema."
    assert remedy in without_tables.stderr


@pytest.mark.parametrize("command", ["config", "--help", "status"])
def test_a_closed_pipe_is_not_an_error(settled: CommandLine, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with settled.started(command, stdout=writer) as process:
        os.close(writer)
        _, stderr = process.communicate()

    assert stderr == b""
    assert process.returncode in ((0, 1) if command == "--help" else (0,))


@pytest.mark.parametrize("words", ["status --json", "--help", "dlq list --help", "--version"])
def test_a_full_disk_is_an_error(settled: CommandLine, words: str) -> None:
    with Path("/dev/full").open("wb") as full, settled.started(*words.split(), stdout=full) as process:
        _, stderr = process.communicate()

    assert process.returncode == 1
    assert stderr == b"dispatcher: stdout cannot be written: No space left on device.\n"


def test_commands_work_with_a_closed_stdout(settled: CommandLine) -> None:
    shell = ["/bin/sh", "-c", '"$@" >&-', "sh", *PROGRAM, "config"]

    done = subprocess.run(shell, capture_output=True, env=settled.whole_environment, cwd=settled.folder, check=False)

    assert (done.returncode, done.stderr) == (0, b"")
