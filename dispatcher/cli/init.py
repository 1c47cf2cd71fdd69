"""`dispatcher init`: creates the tables and the queues, or updates them to this release."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.errors import ConfigurationError, DispatcherError, StoreBusy

if TYPE_CHECKING:
    from dispatcher.config import Settings


_NOTHING_CREATED: Final = "nothing to create: the tables are up to date, and the queues exist and are bound"
"""Names the state of the bindings, because `init` binds every queue, and AMQP does not report whether a binding was
missing."""


@click.command("init")
@click.option(
    "--tries",
    type=click.IntRange(1, 10_000),
    metavar="N",
    default=20,
    show_default=True,
    help="How often each migration tries to lock its tables: 2 s per try, then a pause of 4 s.",
)
@json_option("Print one line of JSON: the changes and faults of each server, and the plan for the tables.")
def command(tries: int, as_json: bool) -> int:
    """Create or update the tables and the queues. Run this command at every deployment: it is safe to repeat.

    \b
    Examples:
      dispatcher init
      dispatcher init --json

    Needs DISPATCHER_DATABASE_URL and DISPATCHER_AMQP_URL. If PostgreSQL fails, the command still prepares RabbitMQ, and
    vice versa. If a queue exists with different arguments, the command reports the difference and does not change the
    queue.

    The command can run while emails are enqueued and sent. It first shows on stderr what it changes, then builds large
    indexes while others write. If another session has locked a table, the command tries again, and names that session.
    Each migration is a transaction of its own: if the command gives up, the migrations that were applied stay applied,
    and a repetition applies the others.

    Exit codes: 0 both servers are ready, 1 neither is, 3 only one is, 75 another session has locked a table, or
    keeps an index from being built, for too long.
    """
    settings = load_settings("database_url", "amqp_url")
    plan: list[str] = []
    parts: dict[str, Callable[[Settings, list[str]], None]] = {
        "postgresql": partial(_migrate, plan=plan, tries=tries),
        "rabbitmq": _declare,
    }
    changes: dict[str, list[str]] = {}
    faults: dict[str, str] = {}
    is_blocked = False
    for server, part in parts.items():
        done: list[str] = []
        try:
            part(settings, done)
        except ConfigurationError:
            raise
        except DispatcherError as error:
            faults[server] = str(error)
            is_blocked = is_blocked or isinstance(error, StoreBusy)
        if done or server not in faults:
            changes[server] = done
    _report(changes, plan, faults, as_json=as_json)
    if not faults:
        return Exit.DONE
    if is_blocked:
        return Exit.BLOCKED
    return Exit.PARTLY if len(faults) < len(parts) else Exit.FAILED


def _migrate(settings: Settings, done: list[str], *, plan: list[str], tries: int) -> None:
    from dispatcher.store.connections import connected
    from dispatcher.store.migrations import apply_missing

    def report(text: str) -> None:
        say(f"postgresql: {text}")

    def report_plan(text: str) -> None:
        plan.append(text)
        report(text)

    report_start: Callable[[str], object] = report if sys.stderr.isatty() else str
    with connected(settings.database_url, name="dispatcher init") as connection:
        done.extend(
            apply_missing(
                connection, tries=tries, report_plan=report_plan, report_start=report_start, report_wait=report
            )
        )


def _declare(settings: Settings, done: list[str]) -> None:
    from dispatcher.broker.topology import Topology, declare

    changes = asyncio.run(declare(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file))
    done += [change for change in changes if change.startswith("declared")]


def _report(changes: dict[str, list[str]], plan: list[str], faults: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json({"changes": changes, "plan": plan, "faults": faults})
    else:
        lines = [f"{server}: {change}" for server, done in changes.items() for change in done]
        if lines or not faults:
            print_data("\n".join(lines or [_NOTHING_CREATED]))
    for server, fault in faults.items():
        say(f"{server}: {fault}")
