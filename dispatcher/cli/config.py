"""`dispatcher config`: shows every setting with its value and source, and reports invalid settings."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass

import click

from dispatcher.cli.environment import RUN_NEEDS, examine_settings, unknown_variables, warnings
from dispatcher.cli.exits import Exit
from dispatcher.cli.masking import MASK, masked, without_login, without_path
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.table import Styled, Table
from dispatcher.config import Origin, Setting, every_setting, suspicious_settings
from dispatcher.config.example import environment_file


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """One setting as `dispatcher config` shows it.

    Attributes:
        value: The value in use, with secrets masked; None if the setting is not set.
        source: `env-file`, `environment`, `file` (a secret's *_FILE) or `default`.
        default: The default as text; None if the setting has no default.
    """

    variable: str
    value: str | None
    source: str
    default: str | None
    about: str


@click.command("config")
@json_option("Print one line of JSON: settings, mistakes, unknown variables.")
@click.option("--example", is_flag=True, help="Print a template for an env file, with an explanation of every setting.")
def command(as_json: bool, example: bool) -> int:
    """Show every setting: variable, value, source, default. Secrets are masked, and so are passwords in URLs.

    \b
    Examples:
      dispatcher config
      DISPATCHER_WORKERS=4 dispatcher config --json | jq '.settings[] | select(.source != "default")'
      dispatcher config --example > dispatcher.env

    Settings are environment variables, or lines of an env file (--env-file or DISPATCHER_ENV_FILE). The env file
    overrides the environment. To read a secret such as DISPATCHER_AMQP_URL from a file, set
    DISPATCHER_AMQP_URL_FILE to the file's path instead.

    The command reports every mistake that would stop `dispatcher run`. It opens no connection: to check the servers,
    use `dispatcher doctor`.

    Exit codes: 0 `dispatcher run` accepts these settings, 78 settings are missing or invalid.
    """
    if example:
        print_data(environment_file().rstrip())
        return Exit.DONE
    settings, origins, mistakes = examine_settings(*RUN_NEEDS)
    lines = [_line(each, origins[each.variable]) for each in every_setting(settings.own)]
    if as_json:
        unknown = [{"variable": name, "closest": close} for name, close in unknown_variables(os.environ).items()]
        print_json({"settings": [asdict(line) for line in lines], "mistakes": mistakes, "unknown": unknown})
    else:
        _show(lines)
    for words in (*warnings(), *suspicious_settings(settings), *mistakes):
        say(words)
    return Exit.BAD_CONFIGURATION if mistakes else Exit.DONE


def _line(declared: Setting, origin: Origin) -> ShownSetting:
    return ShownSetting(declared.variable, _value(declared, origin), origin.source, declared.default, declared.about)


def _value(declared: Setting, origin: Origin) -> str | None:
    """The value as text. A value that an operator set is shown as written, so that a typo is visible. Masks secrets."""
    if origin.text is None:
        return None if declared.default is None else _written(declared.parse(declared.default))
    if not declared.secret:
        return without_login(origin.text)
    try:
        declared.parse(origin.text)
    except ValueError:
        return MASK  # an invalid value cannot be masked in part
    return without_path(origin.text) if declared.is_secret_path else masked(origin.text)


def _written(value: object) -> str:
    """The value as text, as an environment variable would contain it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _show(lines: list[ShownSetting]) -> None:
    """Prints a table: on a terminal, with descriptions; otherwise one line per setting, for programs such as `grep`."""
    is_terminal = sys.stdout.isatty()
    table = Table("variable", "source", "value", fold=2)
    for line in lines:
        is_default = line.source == "default"
        default = f"   (default: {line.default})" if line.default and not is_default else ""
        value = f"{line.value or '-'}{default}"
        table.add(line.variable, line.source, value, style="" if is_default else "bold")
        if is_terminal:
            table.add("", "", Styled(line.about, "dim"))
    table.show()
