"""`dispatcher dev`: starts, stops and shows private servers for development."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Final

import click

from dispatcher.cli.environment import DEV_PREFIX
from dispatcher.cli.exits import Exit, end_by_sigterm
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.table import Table

_FOLDER_VARIABLE: Final = f"{DEV_PREFIX}DIR"

_folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    envvar=_FOLDER_VARIABLE,
    default=Path("var/dev"),
    callback=lambda _context, _option, folder: folder.expanduser().absolute(),
    show_envvar=True,
    help="Folder for the servers' data, logs and secrets. Each folder has its own servers.  [default: var/dev in the "
    "current folder]",
)


@click.group("dev")
def command() -> None:
    """Run a private PostgreSQL and RabbitMQ for development, without root and without Docker.

    \b
    Examples:
      eval "$(dispatcher dev up)"     # starts the servers, and sets this shell's settings
      dispatcher dev status
      dispatcher dev down

    The servers listen on the loopback interface only. If DISPATCHER_DATABASE_URL is set, the command does not start a
    PostgreSQL, but uses the PostgreSQL at this URL. If DISPATCHER_AMQP_URL is set, the same applies to RabbitMQ. Server
    programs that are not installed are downloaded once into DISPATCHER_CACHE_DIR (~/.cache/email-dispatcher).
    """


@command.command("up", short_help="Start the servers, and print the settings that use them.")
@_folder_option
@json_option("Print the settings as one line of JSON, not as `export` lines.")
def up(folder: Path, as_json: bool) -> int:
    """Start the servers, leave them running, and print the settings that use them.

    \b
    Example:
      eval "$(dispatcher dev up)" && dispatcher init && dispatcher run

    `dispatcher run` and `dispatcher api` need no other settings. If the servers are already running, the command prints
    their settings again. The servers keep their data when they are stopped and started again.

    Unless DISPATCHER_PROVIDERS is set, the provider is `capture`, which delivers nothing: it writes emails to the
    folder `mail` below --folder. Unless DISPATCHER_SMS_PROVIDERS is set, the provider `sms-capture` writes SMS to the
    folder `sms` below --folder.

    The settings allow `dispatcher api` to work without an API key (DISPATCHER_API_ALLOW_ANONYMOUS=on), and to serve the
    operators' page (DISPATCHER_OPS=on).
    """
    from dispatcher.dev import servers

    # If SIGTERM arrives when only one of the two servers has started, this command must stop that server.
    end_by_sigterm()
    environment = servers.start(folder, progress=say, owner_pid=None).environment() | _other_settings(folder)
    if as_json:
        print_json(environment)
    else:
        print_data("\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items()))
    say(f"Servers are running in {folder}. To stop them: dispatcher dev down")
    if environment["DISPATCHER_OPS"] == "on":
        address = os.environ.get("DISPATCHER_API_ADDRESS") or "127.0.0.1:8025"
        say(f"While `dispatcher api` runs, this page shows the captured emails: http://{address}/ops/captured")
    if sys.stdout.isatty():
        say('To use the servers in this shell: eval "$(dispatcher dev up)"')
    return Exit.DONE


@command.command("down", short_help="Stop the servers, and keep their data.")
@_folder_option
def down(folder: Path) -> int:
    """Stop the servers, and keep their data. To start with empty servers next time, delete their folder
    (see --folder).

    \b
    Example:
      dispatcher dev down
    """
    from dispatcher.dev import servers

    stopped = servers.stop(folder) if folder.is_dir() else []
    say(f"Stopped {', '.join(stopped)}." if stopped else f"No servers are running in {folder}.")
    return Exit.DONE


@command.command("status", short_help="Show which servers are running.")
@_folder_option
@json_option()
def status(folder: Path, as_json: bool) -> int:
    """Show which servers are running, their process ids, and the folder of their logs.

    \b
    Example:
      dispatcher dev status || eval "$(dispatcher dev up)"

    Exit codes: 0 all servers are running, 1 at least one is not running.
    """
    from dispatcher.dev import servers

    found = servers.status(folder)
    if as_json:
        print_json({"running": found.running, "folder": folder, "pids": found.pids, "logs": found.log_folder})
    elif found.servers is None:
        say(f"No servers are running in {folder}.")
    else:
        sources = {"postgres": found.servers.postgres_source, "rabbitmq": found.servers.rabbitmq_source}
        table = Table("server", "process", "binaries")
        for name in sorted({*sources, *found.pids}):
            table.add(name, found.pids.get(name), sources.get(name, ""))
        table.show()
        say(f"Logs: {found.log_folder}")
    return Exit.DONE if found.running else Exit.FAILED


def _other_settings(folder: Path) -> dict[str, str]:
    """The settings besides the servers' URLs. A setting that the environment already has keeps its value."""
    defaults = {
        "DISPATCHER_PROVIDERS": "capture",
        "DISPATCHER_CAPTURE_DIR": str(folder / "mail"),
        "DISPATCHER_SMS_PROVIDERS": "sms-capture",
        "DISPATCHER_SMS_CAPTURE_DIR": str(folder / "sms"),
        "DISPATCHER_RUN_DIR": str(folder / "run"),
        "DISPATCHER_API_ALLOW_ANONYMOUS": "on",
        "DISPATCHER_OPS": "on",
    }
    named = {name: os.environ.get(name) or value for name, value in defaults.items()}
    return named | {_FOLDER_VARIABLE: str(folder)}
