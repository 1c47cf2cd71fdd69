"""Tests the behaviour that all commands share: imports, settings, exit codes, closed pipes, tables, wrong usage."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dispatcher.cli.table import Table
from tests.cli.commandline import PROGRAM, CommandLine

NEEDLESS = {"rich", "uvloop", "structlog", "psycopg_pool", "dotenv", "boto3", "pydantic", "starlette", "h11"}


def _python(script: str, commandline: CommandLine) -> subprocess.CompletedProcess[str]:
    environment = commandline.whole_environment
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "needless"),
    [
        (["--help"], {"pika", "psycopg"}),
        (["dlq", "list", "--by", "error_type"], {"pika"}),
        (["status"], {"prometheus_client"}),
        (["find", "--to", "ann@example.org"], {"pika", "prometheus_client"}),
    ],
    ids=["help", "dlq list", "status", "find"],
)
def test_commands_import_only_what_they_need(settled: CommandLine, words: list[str], needless: set[str]) -> None:
    script = (
        f"import sys; from dispatcher.cli.main import main; main({words})\n"
        "from dispatcher.config import plugins\n"
        f"print({NEEDLESS | needless} & sys.modules.keys(), "
        "'psycopg' in sys.modules, plugins.installed.cache_info().currsize)\n"
    )

    done = _python(script, settled)

    assert done.stdout.endswith(f"set() {words != ['--help']} 0\n"), done.stdout + done.stderr


def test_run_imports_before_the_fork_what_its_processes_need_and_nothing_else(settled: CommandLine) -> None:
    """The provider is `capture`. The script replaces the first fork, and so sees what the processes would share."""
    script = (
        "import gc, os, sys\n"
        "def fork():\n"
        "    needless = {'botocore', 'starlette', 'sendgrid', 'aiosmtplib', 'cryptography', 'dispatcher.cli.table'}\n"
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


def test_a_table_wraps_cells_becomes_records_if_narrow_and_replaces_control_characters() -> None:
    def table(words: str) -> Table:
        made = Table("email", "count", "words", right=[1])
        made.add("0198c2f4-0000", 7, words)
        made.add("0198c2f4-0001", 1000, "-")
        return made

    assert table("no such user").lines()[0] == "email           count   words"
    assert table("no such user").lines(34)[2:] == [
        "0198c2f4-0000       7   no such",
        "                        user",
        "0198c2f4-0001    1000   -",
    ]
    assert table("日本").lines(24)[:3] == ["email   0198c2f4-0000", "count   7", "words   日本"]
    assert "\x1b" not in table("\x1b[31mred").lines()[2]
    assert max(map(len, table("x" * 1_000_000).lines())) < 5000


def test_a_table_leaves_out_columns_before_it_becomes_records() -> None:
    made = Table("email", "queue", "note", "key", "status", right=[4], optional=("queue", "key"))
    for at in range(2):
        made.add(
            f"0198c2f4-0000-7000-8000-00000000000{at}", "email.dispatcher.normal", "-", f"order-{at}-receipt", "sent"
        )

    def heading(width: int) -> str:
        return " ".join(made.within(width)[0].lines(width)[0].split())

    assert [heading(width) for width in (110, 90, 80, 60)] == [
        "email queue note key status",
        "email queue key status",
        "email key status",
        "email status",
    ]
    assert made.within(80)[1] == ["queue"]
    assert made.within(59) == (made, [])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_that_completes_commands(settled: CommandLine, shell: str) -> None:
    assert f"_DISPATCHER_COMPLETE={shell}_complete" in settled("completion", shell).stdout


ID = "00000000-0000-7000-8000-000000000000"
PRIVATE = "DISPATCHER_WEBHOOKS_ALLOW_PRIVATE"
LANES = "it must be one of DISPATCHER_LANES: urgent, normal, bulk"
ONE_OF_TWO = "'LANE': it is required, or another one of: lane, sender"
NO_SELECTION = "No emails are selected."


# tests/test_actions.py gives each field of each action a wrong value; tests/domain/test_kinds.py has the values.
WRONG: dict[str, str] = {
    "lanes set slow --weight 1": f"'LANE': {LANES}",
    "lanes set bulk --from nothing": "'--from': it must be an address (otp@example.com) or a domain",
    "lanes unset": ONE_OF_TWO,
    "domains set example.org": "needs at least one of: --per-second, --concurrent",
    "domains set 'exa mple.org' --concurrent 1": "Invalid value for 'DOMAIN'",
    "domains set ann@example.org --concurrent 1": "contains an @; write only the part after the @",
    "domains set localhost --concurrent 1": "has no dot",
    "pause tenant acme": "--reason",
    "pause all acme --reason x": "unexpected extra argument",
    "pause lane slow --reason x": LANES,
    "pause provider pigeon --reason x": "it must be one of DISPATCHER_PROVIDERS: smtp",
    "keys create --name shop": "needs --from-domain, --from-address or --from-anywhere",
    "keys create --name shop --from-anywhere --from-domain example.com": "--from-anywhere",
    "keys create --name shop --all-tenants --scope read --allow-lane nosuch": f"'--allow-lane': {LANES}",
    "keys create --name s --all-tenants --scope read --tenant s": "'--all-tenants': it cannot be combined with",
    "webhooks add https://shop.example.com/": "either --tenant or --all-tenants",
    "webhooks add https://shop.example.com/ --tenant shop --events email.read": "email.sent",
    "webhooks add https://127.0.0.1/hooks --all-tenants": f"{PRIVATE}=on allows other",
    "webhooks add https://ann:secret@example.com/ --all-tenants": "no user, password",
    "webhooks replay 1 --since yesterday": "'--since': it must be an age such as 90s, 2h or 3d, or a time such as",
    "suppressions add d@example.org --days 3 --expires-at 2036-01-01T00:00:00Z --reason x --dry-run": "--days",
    "held confirm --reason x": NO_SELECTION,
    "held confirm order-17": "--reason is missing",
    "held confirm order-17 --provider ses --reason x": "not both",
    "held confirm --status failed --reason x": "--status",
    "held confirm --text '' --yes --reason x": "--text",
    "held confirm --tenant ' ' --yes --reason x": "--tenant",
    "cancel --status sent --reason x": "--status",
    "cancel --lane ' ' --reason x": "--lane",
    "reschedule order-17 --now --send-in 1h --reason x": "another one of: send_at, send_in_seconds, now",
    "reschedule order-17 --send-at 2026-12-24T18:00:00 --reason x": "--send-at",
    "dlq list --poison --limit many": "--limit",
    "dlq replay --reason x": "--all",
    "dlq replay --all": "--reason",
    f"dlq replay {ID} --provider ses --reason x": "not both",
    "dlq replay --older-than soon --reason x": "--older-than",
    "dlq reconcile --fix": "--reason",
    "find --to secret": "--to",
    "find --domain secret@example.org": "--domain",
    "find --from secret@": "--from",
    "forget 'not an address' --reason x --yes": "ADDRESS",
    "forget +1 --reason x --yes": "The number must be a phone number",
    "status --watch abc": "'--watch': 'abc' is not a number from 0.1 to 86,400, such as 2.5.",
    "status --history 0s": "--history",
    "status --history 7d --watch": "--watch",
    "doctro": "Did you mean 'doctor'?",
}


@pytest.mark.parametrize(("line", "words"), WRONG.items(), ids=list(WRONG))
def test_wrong_usage_is_refused(bare: CommandLine, line: str, words: str) -> None:
    away = bare.having(DISPATCHER_DATABASE_URL="postgresql://u@127.0.0.1:1/x", DISPATCHER_PROVIDERS="smtp")
    away = away.having(DISPATCHER_AMQP_URL="amqp://u@127.0.0.1:1/")

    ended = away(*shlex.split(line))

    assert (ended.code, ended.stdout) == (2, ""), ended
    assert words in " ".join(ended.stderr.split())
    assert "secret" not in ended.stderr
