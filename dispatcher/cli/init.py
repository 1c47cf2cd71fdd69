"""`dispatcher init`: the tables and the queues, made or brought to this release."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.errors import ConfigurationError, DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings


@click.command("init")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: changes and faults, by server.")
def command(as_json: bool) -> int:
    """Make or update the tables and the queues. Changes nothing that is as it should be; run it at every deployment.

    Needs DISPATCHER_DATABASE_URL and DISPATCHER_AMQP_URL. Does both parts even if one fails. A queue that exists with
    other arguments is left alone and named.

    \b
    Examples:
      dispatcher init
      dispatcher init --json

    Exit codes: 0 both are fit, 1 neither is, 3 one of them is.
    """
    settings = load_settings("database_url", "amqp_url")
    parts: dict[str, Callable[[Settings], list[str]]] = {"postgresql": _migrate, "rabbitmq": _declare}
    changes: dict[str, list[str]] = {}
    faults: dict[str, str] = {}
    for server, part in parts.items():
        try:
            changes[server] = part(settings)
        except ConfigurationError:
            raise
        except DispatcherError as error:
            faults[server] = str(error)
    _tell(changes, faults, as_json=as_json)
    if not faults:
        return Exit.DONE
    return Exit.PARTLY if changes else Exit.FAILED


def _migrate(settings: Settings) -> list[str]:
    from dispatcher.store.connections import connected
    from dispatcher.store.migrations import migrate

    with connected(settings.database_url, name="dispatcher init") as connection:
        return migrate(connection)


def _declare(settings: Settings) -> list[str]:
    from dispatcher.broker.topology import Topology, declare

    done = asyncio.run(declare(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file))
    return [words for words in done if words.startswith("declared")]


def _tell(changes: dict[str, list[str]], faults: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json({"changes": changes, "faults": faults})
    else:
        lines = [f"{server}: {change}" for server, done in changes.items() for change in done]
        if lines or not faults:
            print_data("\n".join(lines or ["nothing to change"]))
    for server, fault in faults.items():
        say(f"{server}: {fault}")
