"""`dispatcher config`: values, sources, masked secrets."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dispatcher.config import every_setting, examine
from tests.cli.commandline import CommandLine

SECRETS = {
    "DISPATCHER_DATABASE_URL": "postgresql://ann:s3cret-a@db/mail",
    "DISPATCHER_AMQP_URL": "amqp://ann:s3cret-b@mq:5672/%2F",
    "DISPATCHER_RABBITMQ_MANAGEMENT_URL": "http://ann:s3cret-c@mq:15672",
    "DISPATCHER_PROVIDERS": "smtp",
    "DISPATCHER_SMTP_URL": "smtp://ann:s3cret-d@mx:587",
}


def _settings(commandline: CommandLine) -> dict[str, dict[str, Any]]:
    return {line["variable"]: line for line in commandline("config", "--json").json["settings"]}


def test_every_setting_is_shown_with_value_source_and_default(bare: CommandLine) -> None:
    shown = _settings(bare.having(**SECRETS, DISPATCHER_WORKERS="3"))

    assert len(shown) == len(every_setting())
    assert shown["DISPATCHER_WORKERS"] == {
        "variable": "DISPATCHER_WORKERS",
        "value": "3",
        "source": "environment",
        "default": "auto",
        "about": shown["DISPATCHER_WORKERS"]["about"],
    }
    assert shown["DISPATCHER_PREFETCH"]["source"] == "default"
    assert shown["DISPATCHER_LEASE_SECONDS"]["value"] == "60"
    assert shown["DISPATCHER_CAPTURE_DIR"]["value"] is None


def test_piped_output_has_one_line_per_setting_with_its_value_as_written(bare: CommandLine) -> None:
    given = {"DISPATCHER_WORKERS": "3", "DISPATCHER_API_ALLOWED_HEADERS": "X-*,List-*"}

    lines = bare.having(**SECRETS, **given)("config").stdout.splitlines()
    shown = {words[0]: words[1:] for words in map(str.split, lines)}

    assert len(lines) == len(every_setting()) + 2
    assert shown["DISPATCHER_WORKERS"] == ["environment", "3", "(default:", "auto)"]
    assert shown["DISPATCHER_API_ALLOWED_HEADERS"][:2] == ["environment", "X-*,List-*"]
    assert shown["DISPATCHER_API_DENIED_EXTENSIONS"][1].startswith("ade,adp,apk,")
    assert shown["DISPATCHER_SENDGRID_SANDBOX"] == ["default", "off"]
    assert shown["DISPATCHER_CAPTURE_DIR"] == ["default", "-"]


def test_no_secret_is_shown(bare: CommandLine) -> None:
    commandline = bare.having(**SECRETS)

    for ended in (commandline("config"), commandline("config", "--json"), commandline.on_terminal("config")):
        assert ended.code == 0
        assert "s3cret" not in ended.stdout + ended.stderr
        assert "amqp://ann:***@mq:5672/%2F" in ended.stdout


def test_a_token_in_a_webhooks_path_and_a_misplaced_login_are_not_shown(bare: CommandLine) -> None:
    commandline = bare.having(
        **SECRETS,
        DISPATCHER_ALERT_WEBHOOK_URL="https://hooks.example/services/s3cret-e",
        DISPATCHER_ALERT_WEBHOOK_SECRET="whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtczNjcmV0",
        DISPATCHER_SES_ENDPOINT_URL="https://ann:s3cret-f@ses.example",
        DISPATCHER_SENDGRID_HOST="https://ann:s3cret-g@api.example",
    )

    for ended in (commandline("config"), commandline("config", "--json"), commandline.on_terminal("config")):
        assert "s3cret" not in ended.stdout + ended.stderr
        assert "https://hooks.example/***" in ended.stdout
    assert "DISPATCHER_SES_ENDPOINT_URL must have no user" in commandline("config").stderr
    assert "s3cret" not in commandline("doctor").stdout


@pytest.mark.parametrize("columns", [100, 200])
def test_control_characters_are_shown_as_replacement_characters(bare: CommandLine, columns: int) -> None:
    hostile = {
        "DISPATCHER_QUEUE": "q\x1b[2J[red]\x9b",
        "DISPATCHER_PROVIDERS": "\x1b]0;x\x07",
        "DISPATCHER_\x1b[1mX": "1",
    }
    commandline = bare.having(NO_COLOR="1", **hostile)

    for ended in (commandline("config"), commandline.on_terminal("config", columns=columns), commandline("doctor")):
        assert not {"\x1b", "\x07", "\x9b"} & set(ended.stdout + ended.stderr)
    assert "[red]" in commandline.on_terminal("config", columns=columns).stdout


def test_invalid_secret_is_masked_whole(bare: CommandLine) -> None:
    ended = bare.having(**SECRETS | {"DISPATCHER_SMTP_URL": "smtpx://ann:s3cret@mx"})("config")

    assert ended.code == 78
    assert "s3cret" not in ended.stdout + ended.stderr
    assert "DISPATCHER_SMTP_URL must be a URL" in ended.stderr


def test_secret_in_a_file_names_the_file_as_its_source(bare: CommandLine) -> None:
    (bare.folder / "url").write_text("postgresql://ann:s3cret@db/mail\n")

    shown = _settings(bare.having(DISPATCHER_DATABASE_URL_FILE=str(bare.folder / "url")))

    assert shown["DISPATCHER_DATABASE_URL"]["source"] == "file"
    assert shown["DISPATCHER_DATABASE_URL"]["value"] == "postgresql://ann:***@db/mail"


def test_mistakes_and_unknown_variables_are_listed_and_invalid_values_are_shown(bare: CommandLine) -> None:
    ended = bare.having(DISPATCHER_WORKERS="many", DISPATCHER_WORKER="1")("config", "--json")

    assert ended.code == 78
    assert {"variable": "DISPATCHER_WORKER", "closest": "DISPATCHER_WORKERS"} in ended.json["unknown"]
    assert any(mistake.startswith("DISPATCHER_WORKERS must be") for mistake in ended.json["mistakes"])
    assert {line["variable"]: line["value"] for line in ended.json["settings"]}["DISPATCHER_WORKERS"] == "many"


def test_terminal_output_is_coloured_and_fits_the_width(bare: CommandLine) -> None:
    ended = bare.having(**SECRETS).on_terminal("config", columns=100)

    assert "\x1b[1m" in ended.stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout).splitlines()
    assert max(map(len, lines)) <= 100
    first_words = {line.partition(" ")[0] for line in lines}
    assert {each.variable for each in every_setting()} <= first_words


def test_no_color_removes_escape_sequences(bare: CommandLine) -> None:
    ended = bare.having(**SECRETS, NO_COLOR="1").on_terminal("config")

    assert "\x1b" not in ended.stdout
    assert max(len(line) for line in ended.stdout.splitlines()) <= 110


def test_other_programs_get_one_line_per_setting(bare: CommandLine) -> None:
    ended = bare.having(**SECRETS)("config")

    assert len(ended.stdout.splitlines()) == len(every_setting()) + 2


def test_uncommenting_the_defaults_of_the_example_changes_no_setting(bare: CommandLine) -> None:
    lines = [line[1:] for line in bare("config", "--example").stdout.splitlines() if line.startswith("#DISPATCHER")]
    given = dict(line.split("=", 1) for line in lines)

    assert examine(given)[0] == examine({})[0]
