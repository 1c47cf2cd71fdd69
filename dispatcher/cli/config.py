"""`dispatcher config`: shows every setting with its value and source, and reports invalid settings."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, dataclass
from typing import Final

import click

from dispatcher.cli.environment import RUN_NEEDS, examine_settings, unknown_variables, warnings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.table import Styled, Table
from dispatcher.config import Origin, Setting, every_setting, suspicious_settings
from dispatcher.config.example import environment_file
from dispatcher.config.values import addresses

MASK: Final = "***"

# The login extends to the last @: people forget to escape @, / and # in passwords, and no part of a password may be
# shown.
_URL: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^:@/?#]*)(?P<password>:.*)?@(?P<rest>[^@]*)", re.DOTALL
)
_BARE_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^@]*", re.DOTALL)
_KEYWORDS: Final = re.compile(r"\s*(?:\w+\s*=\s*(?:'(?:[^'\\]|\\.)*'|[^\s']*)\s*)+")
_SECRET_PARAMETER: Final = re.compile(
    r"(?P<name>\w*(?:pass|secret|token|key)\w*\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&']*)", re.IGNORECASE
)
_LOGIN: Final = re.compile(r"(?<=://).*@|(?<![^\s,])(?!\w+://)[^\s@,:]+:[^\s,]*@", re.DOTALL)
_HOST: Final = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]-]+(?=[/?#]|\Z)")


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """One setting as `dispatcher config` shows it. `source` is `env-file`, `environment`, `file` (a secret's *_FILE) or
    `default`."""

    variable: str
    value: str | None
    source: str
    default: str | None
    about: str


@click.command("config")
@json_option("Print one line of JSON: settings, mistakes, unknown variables.")
@click.option("--changed", is_flag=True, help="Only the settings that are set.")
@click.option("--example", is_flag=True, help="Print a template for an env file, with an explanation of every setting.")
def command(as_json: bool, changed: bool, example: bool) -> int:
    """Show every setting: variable, value, source, default. Secrets are masked, and so are passwords in URLs.

    \b
    Examples:
      dispatcher config
      dispatcher config --changed
      DISPATCHER_WORKERS=4 dispatcher config --json | jq '.settings[] | select(.variable == "DISPATCHER_WORKERS")'
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
    lines = [
        ShownSetting(
            each.variable, _value(each, origin := origins[each.variable]), origin.source, each.default, each.about
        )
        for each in every_setting(settings.own)
        if not changed or origins[each.variable].source != "default"
    ]
    if as_json:
        unknown = [{"variable": name, "closest": close} for name, close in unknown_variables(os.environ).items()]
        print_json({"settings": [asdict(line) for line in lines], "mistakes": mistakes, "unknown": unknown})
    else:
        _show(lines)
    for words in (*warnings(), *suspicious_settings(settings), *mistakes):
        say(words)
    return Exit.BAD_CONFIGURATION if mistakes else Exit.DONE


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


def without_login(text: str) -> str:
    """Masks the user, the password and secret parameters of every URL in a text. For settings that are not secret."""
    return _without_parameters(_LOGIN.sub(f"{MASK}@", text))


def without_path(text: str) -> str:
    """Masks a URL except for its scheme and host, because many webhooks' URLs have a secret path or query."""
    found = _HOST.match(text)
    return f"{found[0]}/{MASK}" if found else MASK


def masked(text: str) -> str:
    """Masks the passwords in a URL or a libpq string; returns `***` for any other text. For secret settings."""
    urls = addresses(text)
    # Split the list only if every URL has a login: otherwise, a part of a password could be mistaken for a URL.
    if len(urls) > 1 and all("@" in url for url in urls):
        return ",".join(map(masked, urls))
    if found := _URL.fullmatch(text):
        password = f":{MASK}" if found["password"] else ""
        return f"{found['scheme']}{found['user']}{password}@{_without_parameters(found['rest'])}"
    if _BARE_URL.fullmatch(text) or _KEYWORDS.fullmatch(text):
        return _without_parameters(text)
    return MASK


def _without_parameters(text: str) -> str:
    return _SECRET_PARAMETER.sub(rf"\g<name>{MASK}", text)
