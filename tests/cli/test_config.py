"""`dispatcher config`: values and sources, masked secrets, and warnings for variables that are not settings."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.cli.config import masked, without_login, without_path
from dispatcher.cli.environment import unknown_variables
from dispatcher.config import every_setting, examine
from tests.cli.commandline import CommandLine

SECRETS = {
    "DISPATCHER_DATABASE_URL": "postgresql://ann:s3cret-a@db/mail",
    "DISPATCHER_AMQP_URL": "amqp://ann:s3cret-b@mq:5672/%2F",
    "DISPATCHER_RABBITMQ_MANAGEMENT_URL": "http://ann:s3cret-c@mq:15672",
    "DISPATCHER_PROVIDERS": "smtp",
    "DISPATCHER_SMTP_URL": "smtp://ann:s3cret-d@mx:587",
}
MISPLACED = {
    "DISPATCHER_ALERT_WEBHOOK_URL": "https://hooks.example/services/s3cret-e",
    "DISPATCHER_ALERT_WEBHOOK_SECRET": "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtczNjcmV0",
    "DISPATCHER_SES_ENDPOINT_URL": "https://ann:s3cret-f@ses.example",
    "DISPATCHER_SENDGRID_HOST": "https://ann:s3cret-g@api.example",
}


def test_every_setting_is_shown_with_value_source_and_default(bare: CommandLine) -> None:
    (bare.folder / "url").write_text("postgresql://ann:s3cret@db/mail\n")
    settings = {**SECRETS, "DISPATCHER_DATABASE_URL": None, "DISPATCHER_DATABASE_URL_FILE": str(bare.folder / "url")}
    lines = bare.having(**settings, DISPATCHER_WORKERS="3")("config", "--json").json["settings"]
    shown = {line["variable"]: line for line in lines}

    assert len(shown) == len(every_setting())
    about = shown["DISPATCHER_WORKERS"].pop("about")
    worker = {"variable": "DISPATCHER_WORKERS", "value": "3", "source": "environment", "default": "auto"}
    assert (shown["DISPATCHER_WORKERS"], bool(about)) == (worker, True)
    assert shown["DISPATCHER_PREFETCH"]["source"] == "default"
    assert shown["DISPATCHER_LEASE_SECONDS"]["value"] == "60"
    assert shown["DISPATCHER_CAPTURE_DIR"]["value"] is None
    url = shown["DISPATCHER_DATABASE_URL"]
    assert (url["source"], url["value"]) == ("file", "postgresql://ann:***@db/mail")


def test_only_changed_settings_are_shown_on_request(bare: CommandLine) -> None:
    lines = bare.having(DISPATCHER_WORKERS="3")("config", "--changed", "--json").json["settings"]

    assert "DISPATCHER_WORKERS" in [line["variable"] for line in lines]
    assert "default" not in [line["source"] for line in lines]


def test_no_secret_is_shown_also_if_it_should_not_be_there_and_lines_fit_a_terminal(bare: CommandLine) -> None:
    right, wrong = bare.having(**SECRETS), bare.having(**SECRETS, **MISPLACED)
    shown = [each("config", *form) for each in (right, wrong) for form in ((), ("--json",))]
    neat, screen = [each.on_terminal("config", columns=100) for each in (right, wrong)]
    invalid = bare.having(**SECRETS | {"DISPATCHER_SMTP_URL": "smtpx://ann:s3cret@mx"})("config")

    assert [each.code for each in shown] == [0, 0, 78, 78]
    for ended in (*shown, screen, invalid, wrong("doctor")):
        assert "s3cret" not in ended.stdout + ended.stderr
    for ended in (*shown, screen):
        assert "amqp://ann:***@mq:5672/%2F" in ended.stdout
    for ended in (*shown[2:], screen):
        assert "https://hooks.example/***" in ended.stdout
    assert "DISPATCHER_SES_ENDPOINT_URL must have no user" in shown[2].stderr
    assert (invalid.code, "DISPATCHER_SMTP_URL must be a URL" in invalid.stderr) == (78, True)
    assert "\x1b[1m" in neat.stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", neat.stdout).splitlines()
    assert max(map(len, lines)) <= 100
    assert {each.variable for each in every_setting()} <= {line.partition(" ")[0] for line in lines}


def test_control_characters_are_replaced_and_no_color_removes_escape_sequences(bare: CommandLine) -> None:
    hostile = {"DISPATCHER_QUEUE": "q\x1b[2J[red]\x9b", "DISPATCHER_PROVIDERS": "\x1b]0;x\x07"}
    commandline = bare.having(NO_COLOR="1", **hostile, **{"DISPATCHER_\x1b[1mX": "1"})
    screen = commandline.on_terminal("config", columns=100)

    for ended in (commandline("config"), commandline("doctor"), screen):
        assert not {"\x1b", "\x07", "\x9b"} & set(ended.stdout + ended.stderr)
    assert "[red]" in screen.stdout


def test_mistakes_and_unknown_variables_are_listed_and_invalid_values_are_shown(bare: CommandLine) -> None:
    ended = bare.having(DISPATCHER_WORKERS="many", DISPATCHER_WORKER="1")("config", "--json")

    assert ended.code == 78
    assert {"variable": "DISPATCHER_WORKER", "closest": "DISPATCHER_WORKERS"} in ended.json["unknown"]
    assert any(mistake.startswith("DISPATCHER_WORKERS must be") for mistake in ended.json["mistakes"])
    assert {line["variable"]: line["value"] for line in ended.json["settings"]}["DISPATCHER_WORKERS"] == "many"


def test_uncommenting_the_defaults_of_the_example_changes_no_setting(bare: CommandLine) -> None:
    lines = [line[1:] for line in bare("config", "--example").stdout.splitlines() if line.startswith("#DISPATCHER")]

    assert examine(dict(line.split("=", 1) for line in lines))[0] == examine({})[0]


MASKED = {
    masked: [
        ("postgresql://ann:secret@db:5432/mail", "postgresql://ann:***@db:5432/mail"),
        ("postgresql://db/mail", "postgresql://db/mail"),
        ("postgresql://ann@db/mail", "postgresql://ann@db/mail"),
        ("postgresql:///mail?host=/run&password=secret&user=ann", "postgresql:///mail?host=/run&password=***&user=ann"),
        ("postgresql://ann@db/mail?sslpassword=secret", "postgresql://ann@db/mail?sslpassword=***"),
        ("host=db password=secret dbname=mail", "host=db password=*** dbname=mail"),
        ("host=db password='se cr\\'et' dbname=mail", "host=db password=*** dbname=mail"),
        ("host=db PASSWORD = secret", "host=db PASSWORD = ***"),
        ("amqp://ann:se%2Fcret@mq:5672/%2F?heartbeat=10", "amqp://ann:***@mq:5672/%2F?heartbeat=10"),
        ("smtp://ann:se@cret@mx:587", "smtp://ann:***@mx:587"),
        ("amqp://ann:se/cr#et?@mq/", "amqp://ann:***@mq/"),
        ("amqp://ann:se@x@a/,amqp://bob:se,c@b/mail", "amqp://ann:***@a/,amqp://bob:***@b/mail"),
        ("amqp://ann:se,amqp://cret@mq/", "amqp://ann:***@mq/"),
        ("amqp://mq/,amqp://ann:secret@mq/", "***"),
        ("postgresql://ann:secret@a:1,b:2/m?options=-cx=1", "postgresql://ann:***@a:1,b:2/m?options=-cx=1"),
        ("SG.abcdef", "***"),
        ("", "***"),
    ],
    without_path: [
        ("https://hooks.slack.com/services/T0/B0/secret", "https://hooks.slack.com/***"),
        ("https://hooks.example:8443?token=secret", "https://hooks.example:8443/***"),
        ("https://[::1]/secret", "https://[::1]/***"),
        ("https://secret@hooks.example/x", "***"),
        ("secret", "***"),
    ],
    without_login: [
        ("https://user:secret@ses.example", "https://***@ses.example"),
        ("https://ses.example?api_key=secret&a=b", "https://ses.example?api_key=***&a=b"),
        ("https://user:se@cr/et@ses.example", "https://***@ses.example"),
        ("https://ses.example", "https://ses.example"),
        ("ann:secret@ses.example", "***@ses.example"),
        ("a@example.com, Shop <b@example.com>", "a@example.com, Shop <b@example.com>"),
        ("127.0.0.1:9464", "127.0.0.1:9464"),
    ],
}


@pytest.mark.parametrize(
    ("mask", "text", "shown"), [(mask, *each) for mask, examples in MASKED.items() for each in examples]
)
def test_the_secret_part_of_a_value_is_masked_and_the_host_is_shown(
    mask: Callable[[str], str], text: str, shown: str
) -> None:
    assert mask(text) == shown


@given(password=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_no_password_of_a_url_is_shown(password: str) -> None:
    assert masked(f"amqp://ann:{password}@mq:5672/") == "amqp://ann:***@mq:5672/"


def test_an_unknown_variable_is_found_with_a_similar_setting() -> None:
    similar = {"WORKER": "WORKERS", "AMPQ_URL": "AMQP_URL", "PROVIDER": "PROVIDERS", "WORKERS_FILE": "WORKERS"}
    known = ("WORKERS", "SMTP_URL_FILE", "CACHE_DIR", "DEV_DIR", "API_URL", "API_KEY")
    variables = [f"DISPATCHER_{name}" for name in (*similar, *known, "QQQQQQQ")]

    found = unknown_variables(dict.fromkeys([*variables, "PATH"], "1"))

    expected = {f"DISPATCHER_{name}": f"DISPATCHER_{setting}" for name, setting in similar.items()}
    assert found == {**expected, "DISPATCHER_QQQQQQQ": None}


def test_a_command_warns_of_an_unknown_variable_and_goes_on(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_WORKRS="4")("status", "--json")

    assert ended.code == 0
    assert ended.stderr == "warning: DISPATCHER_WORKRS is not a setting; did you mean DISPATCHER_WORKERS?\n"
