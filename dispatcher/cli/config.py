"""`dispatcher config`: every setting, where its value comes from, and what is wrong with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, fields
from typing import Any, Final

import click

from dispatcher.cli.environment import examine_settings, unknown_variables, warnings
from dispatcher.cli.exits import Exit
from dispatcher.cli.masking import MASK, masked, without_login, without_path
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.table import Styled, Table
from dispatcher.config import Origin, Settings, doubts, variable_of

RUN_NEEDS: Final = ("database_url", "amqp_url", "providers")
API_NEEDS: Final = ("database_url", "amqp_url")
_HEAD: Final = """\
# Email Dispatcher: the settings of one host. A line counts once the # before its name is gone; what stands there is the
# default. `dispatcher config` shows what a host has, `dispatcher doctor` whether it works.
# Every command reads this file if --env-file or DISPATCHER_ENV_FILE names it. A line here overrides the same variable
# of the environment. Nothing is expanded: a $ is a $. Put quotes around a value that has quotes, a line break, or a
# space before a #.
"""


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """One setting, as it is shown.

    Attributes:
        value: What counts now, secrets masked; None if it is not set.
        source: `env-file`, `environment`, `file` (of a secret) or `default`.
        default: None where there is none.
    """

    variable: str
    value: str | None
    source: str
    default: str | None
    about: str


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: settings, mistakes, unknown variables.")
@click.option("--example", is_flag=True, help="An environment file that explains every setting, to be filled in.")
def command(as_json: bool, example: bool) -> int:
    """Show every setting: variable, value, source, default. Secrets are masked, passwords in URLs too.

    Settings are environment variables, or lines of the file that --env-file or DISPATCHER_ENV_FILE names, which
    override them. A setting that holds a secret may be given as a file instead, by its variable with _FILE appended.
    Reports what `run` would refuse. Opens no connection; `dispatcher doctor` does.

    \b
    Examples:
      dispatcher config
      DISPATCHER_WORKERS=4 dispatcher config --json | jq '.settings[] | select(.source != "default")'
      dispatcher config --example > dispatcher.env

    Exit codes: 0 `run` could start with these settings, 78 there are mistakes.
    """
    if example:
        print_data(environment_file().rstrip())
        return Exit.DONE
    settings, origins, mistakes = examine_settings(*RUN_NEEDS)
    lines = [_line(item, settings, origins[item.name]) for item in fields(Settings)]
    if as_json:
        unknown = [{"variable": name, "closest": close} for name, close in unknown_variables(os.environ).items()]
        print_json({"settings": [asdict(line) for line in lines], "mistakes": mistakes, "unknown": unknown})
    else:
        _show(lines)
    for words in (*warnings(), *doubts(settings), *mistakes):
        say(words)
    return Exit.BAD_CONFIGURATION if mistakes else Exit.DONE


def environment_file() -> str:
    """Every setting, commented out and explained; deploy/dispatcher.env is this."""
    return _HEAD + "".join(f"\n{_entry(item)}" for item in fields(Settings))


def _entry(item: Field[Any]) -> str:
    variable, default = variable_of(item), item.metadata["default"]
    about = item.metadata["about"] + (f" Or {variable}_FILE." if item.metadata["secret"] else "")
    return f"# {about}\n#{variable}={default or ''}\n"


def _line(item: Field[Any], settings: Settings, origin: Origin) -> ShownSetting:
    metadata: Mapping[str, Any] = item.metadata
    return ShownSetting(
        variable_of(item), _value(item, settings, origin), origin.source, metadata["default"], metadata["about"]
    )


def _value(item: Field[Any], settings: Settings, origin: Origin) -> str | None:
    """The value as text: what was written where it was written, so that a mistake can be seen."""
    if origin.text is None:
        return _written(getattr(settings, item.name)) if item.metadata["default"] is not None else None
    if not item.metadata["secret"]:
        return without_login(origin.text)
    try:
        item.metadata["parse"](origin.text)
    except ValueError:
        return MASK  # what cannot be understood cannot be masked in part
    return without_path(origin.text) if item.metadata["is_secret_path"] else masked(origin.text)


def _written(value: object) -> str:
    """A value as one would write it in the environment."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _show(lines: list[ShownSetting]) -> None:
    """On a terminal, what a setting is about stands below it; other programs get a line each, for `grep`."""
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
