"""`dispatcher`: finds the command, runs it, and turns how it ended into words and an exit code."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Final

import click

from dispatcher.cli.exits import Exit, exit_of
from dispatcher.cli.lazy_group import LazyGroup
from dispatcher.cli.output import flush_data, prepare_streams, say, unwritten
from dispatcher.errors import ConfigurationError, DispatcherError
from dispatcher.version import VERSION

COMMANDS: Final = {
    "run": ("run:command", "Send what is enqueued: the workers, relay and monitor of this host."),
    "api": ("api:command", "Accept emails over HTTP."),
    "keys": ("keys:command", "Make, list and revoke the HTTP API's keys."),
    "init": ("init:command", "Make or update the tables and the queues."),
    "enqueue": ("enqueue:command", "Accept one email, or a file of them."),
    "status": ("status:command", "Count emails by status, and messages by queue."),
    "held": ("held:command", "List, confirm or release emails whose outcome is unknown."),
    "dlq": ("dlq:command", "Dead letters: list, show, replay, discard, reconcile."),
    "config": ("config:command", "Show every setting: value, source, default."),
    "doctor": ("doctor:command", "Check everything that sending depends on, and say how to mend it."),
    "topology": (
        "topology:command",
        "Print RabbitMQ's users and PostgreSQL's GRANTs with the fewest permissions that work.",
    ),
    "prune": ("prune:command", "Forget emails that are older than the settings keep them."),
    "alerts": ("alerts:command", "Try the ways by which alerts reach a person."),
    "dev": ("dev:command", "Private PostgreSQL and RabbitMQ for development."),
    "demo": ("demo:command", "Watch a thousand emails travel the whole chain."),
}
"""Where each is and what it does, in the order of `--help`."""


@click.group(
    cls=LazyGroup,
    parts=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`dispatcher COMMAND --help` tells what a command needs, with examples. Exit codes: 0 done, 1 failed, "
    "2 usage, 3 partly done, 78 bad configuration.",
)
@click.version_option(VERSION, prog_name="dispatcher", message="%(prog)s %(version)s")
def dispatcher() -> None:
    """Sends transactional email asynchronously: loses none, duplicates none, and says what it knows about each.

    \b
    To try it, with servers of your own and emails captured in a folder:
      eval "$(dispatcher dev up)"
      dispatcher init
      dispatcher enqueue --key hello-1 --from me@example.com --to you@example.org \\
                         --subject Hello --text "It works."
      dispatcher run          # in another terminal: dispatcher status --watch
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code.

    Args:
        arguments: Without the program's name; None for those of this process.
    """
    prepare_streams()
    try:
        result = _run(arguments)
    except click.Abort:
        return Exit.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except DispatcherError as error:
        return report(error)
    return int(result or Exit.DONE)


def _run(arguments: Sequence[str] | None) -> int | None:
    """Runs the command; what it wrote to stdout is there when this returns."""
    try:
        result: int | None = dispatcher.main(arguments, prog_name="dispatcher", standalone_mode=False)
    except OSError as error:
        if _raised_in(error) is not click.echo.__code__:
            raise
        raise unwritten(error) from error  # help and version, which click writes
    flush_data()
    return result


def _raised_in(error: BaseException) -> CodeType | None:
    """The innermost function of ours or a library's that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame.f_code


def program() -> int:
    """`main` for a process of its own, which ends with it; here and now after a brief command (see `LazyGroup`)."""
    try:
        code = main()
    finally:
        # The interpreter looks through all that it ever made before it ends: a fifth of what a short command takes.
        gc.freeze()
    if not gc.isenabled():
        _end(code)
    return code


def _end(code: int) -> None:
    """Ends the process without taking the interpreter apart, piece by piece: 10 ms of 200."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # the interpreter's own end has words for it
    os._exit(code)


def report(error: DispatcherError) -> Exit:
    """Says on stderr what is wrong and what to do; returns what the command has to exit with."""
    if isinstance(error, ConfigurationError):
        for mistake in error.mistakes:
            say(mistake)
    else:
        say(f"dispatcher: {error.message}")
        if error.remedy:
            say(error.remedy)
    return exit_of(error)


if __name__ == "__main__":
    sys.exit(program())
