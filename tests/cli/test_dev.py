"""`dispatcher dev`: its output in a shell. `tests/dev` tests that servers start and stop."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

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
    done = subprocess.run(
        ["/bin/sh", "-euc", script],
        cwd=commandline.folder,
        env=commandline.whole_environment,
        capture_output=True,
        check=True,
    )
    variables = dict(line.partition("=")[::2] for line in done.stdout.decode().split("\0"))
    return {name: value for name, value in variables.items() if name.startswith("DISPATCHER_")}


def test_shell_has_every_setting_after_eval(named: CommandLine, servers: Servers) -> None:
    folder = named.folder / "var" / "dev"

    assert _evaluated(named) == {
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


def test_folder_with_special_characters_is_quoted_for_the_shell(named: CommandLine) -> None:
    folder = named.folder / 'it\'s a $HOME `of` "mine"; true'

    assert _evaluated(named, "--folder", str(folder))["DISPATCHER_RUN_DIR"] == str(folder / "run")


def test_provider_of_the_environment_is_kept(named: CommandLine) -> None:
    chosen = named.having(DISPATCHER_PROVIDERS="smtp", DISPATCHER_SMTP_URL="smtp://127.0.0.1:2525?tls=none")

    assert _evaluated(chosen)["DISPATCHER_PROVIDERS"] == "smtp"


def test_settings_are_complete(named: CommandLine) -> None:
    ready = named.having(**_evaluated(named))

    assert ready("config").code == 0
    assert ready("config").stderr == ""


def test_settings_go_to_stdout_and_messages_to_stderr(named: CommandLine) -> None:
    ended = named("dev", "up")

    assert ended.code == 0
    assert all(line.startswith("export DISPATCHER_") for line in ended.stdout.splitlines())
    assert "dispatcher dev down" in ended.stderr


def test_json_has_the_same_settings(named: CommandLine) -> None:
    assert named("dev", "up", "--json").json == _evaluated(named)


def test_without_servers_down_does_nothing_and_status_exits_with_1(bare: CommandLine) -> None:
    down, status = bare("dev", "down"), bare("dev", "status", "--json")

    assert (down.code, status.code) == (0, 1)
    assert status.json["running"] is False
    assert not Path(bare.folder / "var").exists()


def test_status_after_up_shows_the_source_of_each_server(named: CommandLine) -> None:
    named("dev", "up")

    ended = named("dev", "status")

    assert ended.code == 0
    assert "set in DISPATCHER_AMQP_URL" in ended.stdout
