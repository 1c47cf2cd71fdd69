"""`dispatcher dev`: private servers that stay until they are told to go."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Final

import click

from dispatcher.cli.environment import DEV_PREFIX
from dispatcher.cli.exits import Exit, end_by_sigterm
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.table import Table

_FOLDER_VARIABLE: Final = f"{DEV_PREFIX}DIR"

_folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=_FOLDER_VARIABLE,
    default=Path("var/dev"),
    show_default="var/dev below the current folder",
    show_envvar=True,
    help="Where their data, logs and secrets are. One folder is one set of servers.",
)


@click.group("dev")
def command() -> None:
    """Private PostgreSQL and RabbitMQ for development: no root, no docker, loopback only, data of their own.

    Servers that DISPATCHER_DATABASE_URL or DISPATCHER_AMQP_URL name are used and not started. Binaries that are not
    installed are fetched once into DISPATCHER_CACHE_DIR (~/.cache/email-dispatcher).

    \b
    Examples:
      eval "$(dispatcher dev up)"     # servers run, and this shell's settings point to them
      dispatcher dev status
      dispatcher dev down
    """


@command.command("up", short_help="Start them, and print the settings that point to them.")
@_folder_option
@click.option("--json", "as_json", is_flag=True, help="The settings as one line of JSON instead of `export` lines.")
def up(folder: Path, as_json: bool) -> int:
    """Start them, leave them running, and print the settings that point to them.

    The settings are complete: the provider is `capture`, which writes emails into the folder's `mail` and delivers
    nothing, unless DISPATCHER_PROVIDERS names another, and `api` needs no key (DISPATCHER_API_ALLOW_ANONYMOUS). Servers
    that run already are described again. Data stays from one `up` to the next.

    \b
    Example:
      eval "$(dispatcher dev up)" && dispatcher init && dispatcher run
    """
    from dispatcher.dev import servers

    folder = folder.expanduser().absolute()
    # A supervisor's or shell's SIGTERM must not leave half of them running.
    end_by_sigterm()
    environment = servers.start(folder, progress=say, owner_pid=None).environment() | _surroundings(folder)
    if as_json:
        print_json(environment)
    else:
        print_data("\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items()))
    say(f"Servers run in {folder}; `dispatcher dev down` stops them.")
    if sys.stdout.isatty():
        say('For a shell that uses them: eval "$(dispatcher dev up)"')
    return Exit.DONE


@command.command("down")
@_folder_option
def down(folder: Path) -> int:
    """Stop them; no process stays. Their data stays: delete the folder to begin anew.

    \b
    Example:
      dispatcher dev down
    """
    from dispatcher.dev import servers

    folder = folder.expanduser().absolute()
    stopped = servers.stop(folder) if folder.is_dir() else []
    say(f"Stopped {', '.join(stopped)}." if stopped else f"No servers run in {folder}.")
    return Exit.DONE


@command.command("status")
@_folder_option
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def status(folder: Path, as_json: bool) -> int:
    """Tell which of them run. Exits with 0 if all do, with 1 if not.

    \b
    Example:
      dispatcher dev status || eval "$(dispatcher dev up)"
    """
    from dispatcher.dev import servers

    folder = folder.expanduser().absolute()
    found = servers.status(folder)
    if as_json:
        print_json({"running": found.running, "folder": folder, "pids": found.pids, "logs": found.log_folder})
    elif found.servers is None:
        say(f"No servers run in {folder}.")
    else:
        sources = {"postgres": found.servers.postgres_source, "rabbitmq": found.servers.rabbitmq_source}
        table = Table("server", "process", "binaries")
        for name in sorted({*sources, *found.pids}):
            table.add(name, found.pids.get(name), sources.get(name, ""))
        table.show()
        say(f"Logs: {found.log_folder}")
    return Exit.DONE if found.running else Exit.FAILED


def _surroundings(folder: Path) -> dict[str, str]:
    """The settings beside the servers' own; what the environment names already stays."""
    defaults = {
        "DISPATCHER_PROVIDERS": "capture",
        "DISPATCHER_CAPTURE_DIR": str(folder / "mail"),
        "DISPATCHER_RUN_DIR": str(folder / "run"),
        "DISPATCHER_API_ALLOW_ANONYMOUS": "on",
    }
    named = {name: os.environ.get(name) or value for name, value in defaults.items()}
    return named | {_FOLDER_VARIABLE: str(folder)}
