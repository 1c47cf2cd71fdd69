"""`dispatcher dev` in a shell. `tests/dev` tests that servers start and stop."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from dispatcher.dev.servers import Servers
from tests.cli.commandline import PROGRAM, CommandLine


@pytest.fixture
def named(bare: CommandLine, servers: Servers) -> CommandLine:
    """`dispatcher` with the servers' URLs in its environment, so that it starts no servers."""
    return bare.having(**servers.environment(), DISPATCHER_RUN_DIR=None, DISPATCHER_METRICS_ADDRESS=None)


def _evaluated(commandline: CommandLine, *arguments: str) -> dict[str, str]:
    """The DISPATCHER_ variables of a shell after `eval "$(dispatcher dev up)"`."""
    script = f'eval "$({shlex.join([*PROGRAM, "dev", "up", *arguments])})" && env -0'
    environment = commandline.whole_environment
    shell = ["/bin/sh", "-euc", script]
    done = subprocess.run(shell, cwd=commandline.folder, env=environment, capture_output=True, check=True)
    variables = dict(line.partition("=")[::2] for line in done.stdout.decode().split("\0"))
    return {name: value for name, value in variables.items() if name.startswith("DISPATCHER_")}


def test_a_shell_has_every_setting_after_eval_however_the_folder_is_named(named: CommandLine, servers: Servers) -> None:
    folder = named.folder / 'it\'s a $HOME `of` "mine"; true'

    settings = _evaluated(named, "--folder", str(folder))

    assert settings == {
        **servers.environment(),
        "DISPATCHER_PROVIDERS": "capture",
        "DISPATCHER_CAPTURE_DIR": str(folder / "mail"),
        "DISPATCHER_SMS_PROVIDERS": "sms-capture",
        "DISPATCHER_SMS_CAPTURE_DIR": str(folder / "sms"),
        "DISPATCHER_RUN_DIR": str(folder / "run"),
        "DISPATCHER_API_ALLOW_ANONYMOUS": "on",
        "DISPATCHER_OPS": "on",
        "DISPATCHER_DEV_DIR": str(folder),
    }
    complete = named.having(**settings)("config")
    assert (complete.code, complete.stderr) == (0, "")


def test_a_provider_of_the_environment_is_kept_and_messages_go_to_stderr(named: CommandLine) -> None:
    chosen = named.having(DISPATCHER_PROVIDERS="smtp", DISPATCHER_SMTP_URL="smtp://127.0.0.1:2525?tls=none")

    ended, as_json = chosen("dev", "up"), chosen("dev", "up", "--json").json

    assert ended.code == 0
    exported = [line.removeprefix("export ").partition("=")[::2] for line in ended.stdout.splitlines()]
    assert {name: shlex.split(value)[0] for name, value in exported} == as_json
    assert as_json["DISPATCHER_PROVIDERS"] == "smtp"
    assert as_json["DISPATCHER_RUN_DIR"] == str(named.folder / "var" / "dev" / "run")
    assert "dispatcher dev down" in ended.stderr


def test_status_shows_the_source_of_each_server_or_exits_with_1(named: CommandLine, bare: CommandLine) -> None:
    down, stopped = bare("dev", "down"), bare("dev", "status", "--json")
    assert (down.code, stopped.code, stopped.json["running"]) == (0, 1, False)
    assert not (bare.folder / "var").exists()
    named("dev", "up")

    ended = named("dev", "status")

    assert ended.code == 0
    assert "set in DISPATCHER_AMQP_URL" in ended.stdout
