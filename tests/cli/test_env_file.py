"""Tests settings from an env file: syntax, precedence, and errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from dispatcher.cli.env_file import MAX_OCTETS, EnvFile, parse
from dispatcher.cli.main import dispatcher
from dispatcher.config.example import environment_file
from dispatcher.errors import ConfigurationError
from tests.cli.commandline import CommandLine

PATH = Path("/etc/dispatcher.env")
COMPLETE = (
    "DISPATCHER_DATABASE_URL=postgresql://a:s3cret@db/m\nDISPATCHER_AMQP_URL=amqp://mq\nDISPATCHER_PROVIDERS=ses\n"
)


def shown(commandline: CommandLine, *arguments: str) -> dict[str, tuple[str, str]]:
    ended = commandline("config", "--json", *arguments)
    return {line["variable"]: (line["value"], line["source"]) for line in ended.json["settings"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=b", "b"),
        ("export A=b", "b"),
        ("  A = b  ", "b"),
        ("A=", ""),
        ("A=b # why", "b"),
        ("A=p#ss", "p#ss"),
        ("A=$HOME ${HOME} $(id) `id`", "$HOME ${HOME} $(id) `id`"),
        ('A="$HOME ${HOME}"', "$HOME ${HOME}"),
        ("A='b # c'", "b # c"),
        (r"A='b\n'", r"b\n"),
        (r'A="b \" c"', 'b " c'),
        ("A=host=db dbname=mail", "host=db dbname=mail"),
        ("A=b\r\n", "b"),
        ("\ufeffA=b", "b"),
        (f"{environment_file()}\nA=b", "b"),
    ],
)
def test_a_line_is_parsed_like_in_a_shell_but_nothing_is_expanded(text: str, value: str) -> None:
    assert {name: line.value for name, line in parse(PATH, text).items()} == {"A": value}


def test_every_mistake_names_file_and_line_and_no_value() -> None:
    text = "A=1\n\n\nB s3cret\nC='s3cret\nD\nA=s3cret\nE-F=s3cret\nDISPATCHER_ENV_FILE=s3cret\nG=s3\0cret\n"

    with pytest.raises(ConfigurationError) as raised:
        parse(PATH, text)
    found = raised.value.mistakes

    assert [mistake.partition(": ")[0] for mistake in found] == [f"{PATH}, line {n}" for n in (4, 5, 6, 7, 8, 9, 10)]
    assert "A is already set in line 1" in found[3]
    assert "s3cret" not in " ".join(found)


def without_env_file(command: click.Command, words: str) -> list[str]:
    if isinstance(command, click.Group):
        return [found for name, each in command.commands.items() for found in without_env_file(each, f"{words} {name}")]
    return [] if any("--env-file" in option.opts for option in command.params) else [words]


def test_every_command_takes_an_env_file() -> None:
    context = click.Context(dispatcher)
    commands = {name: dispatcher.get_command(context, name) for name in dispatcher.list_commands(context)}

    assert [found for name, each in commands.items() if each for found in without_env_file(each, name)] == []


def test_a_line_overrides_the_environment_with_a_warning_if_the_values_differ(bare: CommandLine) -> None:
    file = bare.folder / "dispatcher.env"
    file.write_text(f"{COMPLETE}DISPATCHER_WORKERS=4\nDISPATCHER_PREFETCH=\n")
    older = bare.having(DISPATCHER_WORKERS="2", DISPATCHER_PREFETCH="7", DISPATCHER_BUNDLE_EMAILS="3")

    found = shown(older, "--env-file", str(file))
    ended = older.having(DISPATCHER_ENV_FILE=str(file))("config")

    assert found["DISPATCHER_WORKERS"] == ("4", "env-file")
    assert found["DISPATCHER_PREFETCH"] == ("256", "default")
    assert found["DISPATCHER_BUNDLE_EMAILS"] == ("3", "environment")
    assert found["DISPATCHER_DATABASE_URL"] == ("postgresql://a:***@db/m", "env-file")
    warning = f"warning: DISPATCHER_WORKERS has a different value in the environment. The value in {file} is used."
    assert warning in ended.stderr
    assert ended.code == 0


@pytest.mark.parametrize(("inherited", "written"), [("SMTP_URL", "SMTP_URL_FILE"), ("SMTP_URL_FILE", "SMTP_URL")])
def test_secrets_in_the_env_file_replace_both_inherited_forms(bare: CommandLine, inherited: str, written: str) -> None:
    secret, file = bare.folder / "smtp-url", bare.folder / "dispatcher.env"
    secret.write_text("smtp://new")
    file.write_text(f"{COMPLETE}DISPATCHER_{written}={secret if written.endswith('_FILE') else 'smtp://new'}\n")

    found = shown(bare.having(**{f"DISPATCHER_{inherited}": "smtp://old"}), "--env-file", str(file))

    assert found["DISPATCHER_SMTP_URL"][0] == "smtp://new"


def test_the_mistake_of_a_setting_names_its_line(bare: CommandLine) -> None:
    file = bare.folder / "dispatcher.env"
    file.write_text(f"{COMPLETE}\nDISPATCHER_WORKERS=many\n")

    ended = bare("status", "--env-file", str(file))

    assert ended.code == 78
    assert ended.stderr == f"{file}, line 5: DISPATCHER_WORKERS must be a whole number from 1 to 256, or auto.\n"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Path.mkdir, id="folder"),
        pytest.param(os.mkfifo, id="fifo"),
        pytest.param(lambda file: file.symlink_to("/dev/zero"), id="device"),
        pytest.param(lambda file: file.write_bytes(b"A=1\nB=\xff\n"), id="not UTF-8"),
        pytest.param(lambda file: file.write_text("#" * (MAX_OCTETS + 1)), id="too large"),
        pytest.param(lambda file: (file.touch(), file.chmod(0o666)), id="open to all"),
    ],
)
def test_a_path_that_is_not_a_readable_env_file_is_refused(bare: CommandLine, make: Callable[[Path], object]) -> None:
    file = bare.folder / "dispatcher.env"
    make(file)

    ended = bare("status", "--env-file", str(file))

    assert ended.code == 78
    assert str(file) in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_service_logs_the_mistakes_in_its_env_file(bare: CommandLine) -> None:
    (bare.folder / "dispatcher.env").write_text("DISPATCHER_WORKERS 4\n")

    for service in ("run", "api"):
        ended = bare.having(DISPATCHER_LOG_FORMAT="json")(service, "--env-file", "dispatcher.env")
        assert (ended.code, ended.stderr) == (78, "")
        assert ended.json["event"] == "startup.failed"
        assert "dispatcher.env, line 1: the line is not NAME=value" in ended.json["reason"]


def test_reading_again_removes_variables_without_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"A": "inherited", "C_FILE": "inherited"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("B", raising=False)
    path = tmp_path / "dispatcher.env"
    path.write_text("A=1\nB=1\nC=1\n")
    file = EnvFile(path)
    before = dict(os.environ)
    file.read()
    assert "C_FILE" not in os.environ

    path.write_text("C=2\n")
    with file.read_again():
        assert os.environ["C"] == "2"
        assert (os.environ["A"], os.environ.get("B")) == ("inherited", None)
    path.write_text("A=3\n")
    with pytest.raises(ValueError, match="mistaken"), file.read_again():
        raise ValueError("mistaken")
    assert os.environ["C"] == "2"

    path.write_text("")
    file.read()
    assert dict(os.environ) == before


@pytest.mark.parametrize(("mode", "state"), [(0o644, "warning"), (0o640, "ok")])
def test_doctor_warns_of_an_env_file_that_every_user_may_read(bare: CommandLine, mode: int, state: str) -> None:
    file = bare.folder / "dispatcher.env"
    file.write_text("DISPATCHER_SMTP_URL=smtp://a:s3cret@mx\nAWS_SECRET_ACCESS_KEY=s3cret\nDISPATCHER_WORKERS=1\n")
    file.chmod(mode)

    ended = bare("doctor", "--json", "--env-file", str(file))
    found = next(each for each in ended.json["findings"] if each["subject"] == "env file")

    assert found["state"] == state
    assert "s3cret" not in ended.stdout
    if state == "warning":
        assert "(AWS_SECRET_ACCESS_KEY, DISPATCHER_SMTP_URL)" in found["detail"]
        assert f"chmod o= {file}" in found["remedy"]
