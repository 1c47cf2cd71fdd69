"""`dispatcher init`: creates the tables and the queues, or updates them to this release."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.errors import ConfigurationError, DispatcherError

if TYPE_CHECKING:
    from dispatcher.config import Settings


@click.command("init")
@json_option("Print one line of JSON: the changes and faults of each server.")
def command(as_json: bool) -> int:
    """Create or update the tables and the queues. Run this command at every deployment: it is safe to repeat.

    \b
    Examples:
      dispatcher init
      dispatcher init --json

    Needs DISPATCHER_DATABASE_URL and DISPATCHER_AMQP_URL. If PostgreSQL fails, the command still prepares RabbitMQ, and
    vice versa. If a queue exists with different arguments, the command reports the difference and does not change the
    queue.

    Exit codes: 0 both servers are ready, 1 neither is, 3 only one is.
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
    _report(changes, faults, as_json=as_json)
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
    return [change for change in done if change.startswith("declared")]


def _report(changes: dict[str, list[str]], faults: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json({"changes": changes, "faults": faults})
    else:
        lines = [f"{server}: {change}" for server, done in changes.items() for change in done]
        if lines or not faults:
            print_data("\n".join(lines or ["nothing to change"]))
    for server, fault in faults.items():
        say(f"{server}: {fault}")
