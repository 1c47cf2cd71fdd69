"""`dispatcher`: runs a command, prints its error, and returns its exit code."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import click

from dispatcher.cli.exits import Exit, exit_of
from dispatcher.cli.lazy_group import LazyGroup
from dispatcher.cli.output import flush_data, prepare_streams, say, unwritten
from dispatcher.errors import ConfigurationError, DispatcherError
from dispatcher.version import VERSION

_UNDECODED: Final = re.compile("[\udc80-\udcff]")
"""Matches the characters with which Python represents the bytes of an argument that are not UTF-8."""
COMMANDS: Final = {
    "run": ("run:command", "Send enqueued emails: run this host's workers, relay and monitor."),
    "api": ("api:command", "Serve the HTTP API, which accepts emails."),
    "smtp": ("smtp:command", "Serve SMTP, which accepts emails from clients with an API key."),
    "keys": ("actions.keys", "Create, list and revoke API keys, for HTTP, SMTP and the operators' page."),
    "init": ("init:command", "Create or update the tables and the queues."),
    "enqueue": ("enqueue:command", "Enqueue one email, or a file of emails."),
    "show": ("show:command", "Show everything about one email: status, timeline, attempts, events."),
    "find": ("find:command", "Find emails by recipient, domain, tag, sender, status, time."),
    "status": ("status:command", "Count emails by status, and messages by queue."),
    "stats": ("actions.stats", "Show how many emails were sent, failed and bounced, by day, tenant or tag."),
    "cancel": ("actions.unsent", "Cancel emails that are not sent yet."),
    "reschedule": ("actions.unsent", "Change the send time of emails that are not sent yet."),
    "resend": ("resend:command", "Enqueue a corrected copy of a finished email."),
    "lanes": ("actions.lanes", "List lanes; set their shares, policies and senders."),
    "tenants": ("actions.tenants", "List tenants with their statistics; set their rates and shares."),
    "domains": ("actions.domains", "Limit the emails that the provider smtp sends to a recipient domain."),
    "pause": ("actions.pauses", "Stop sending: everything, or one lane, tenant or provider."),
    "resume": ("actions.pauses", "End a pause."),
    "held": ("actions.held", "List, confirm or release emails whose outcome is unknown."),
    "dlq": ("dlq:command", "List, show, replay, discard or reconcile dead letters."),
    "webhooks": ("webhooks:command", "Add, list, test and replay webhooks, which post events to applications."),
    "suppressions": ("suppressions:command", "List, add or remove recipients who get no email."),
    "events": ("actions.reported_events", "List what providers reported about emails."),
    "audit": ("actions.audit", "Show what operators did: who, when and why."),
    "config": ("config:command", "Show every setting: value, source, default."),
    "doctor": ("doctor:command", "Check settings, servers, providers and senders' DNS, and say how to fix each fault."),
    "topology": (
        "topology:command",
        "Print commands that give RabbitMQ users and PostgreSQL roles the least privileges.",
    ),
    "prune": ("prune:command", "Delete emails that are older than the retention settings allow."),
    "forget": ("forget:command", "Erase a recipient's address, and the content of the recipient's emails."),
    "alerts": ("alerts:command", "Send a test alert through every channel."),
    "dev": ("dev:command", "Run a private PostgreSQL and RabbitMQ for development."),
    "completion": ("completion:command", "Print the script that completes commands in bash, zsh or fish."),
    "demo": ("demo:command", "Send a thousand emails through the whole system, on private servers."),
}
"""For each command's name, `module:function` and a summary; in the order of `--help` (see `LazyGroup`)."""


@click.group(
    cls=LazyGroup,
    parts=COMMANDS,
    uncollected=("run", "find", "show", "status"),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`dispatcher COMMAND --help` explains a command, with examples. Exit codes: 0 done, 1 failed, "
    "2 wrong usage, 3 partly done, 78 bad configuration.",
)
@click.version_option(VERSION, prog_name="dispatcher", message="%(prog)s %(version)s")
def dispatcher() -> None:
    """Send transactional email in the background, without losing an email or sending one twice.

    \b
    To try it with private servers, and a provider that writes emails to a folder:
      eval "$(dispatcher dev up)"
      dispatcher init
      dispatcher enqueue --key hello-1 --from me@example.com --to you@example.org \\
                         --subject Hello --text "It works."
      dispatcher run                      # sends the email; stop this command with Ctrl-C
      ls "$DISPATCHER_CAPTURE_DIR/new"    # the email that was sent

    \b
    Terms in the help of the commands:
      message key     the application's own unique name for an email
      DLQ             the dead-letter queue in RabbitMQ; it has a message for each failed or held email
      dead letter     a message on the DLQ
      poison message  a RabbitMQ message that points to no email
      held            the status of an email that may have been sent; an operator decides whether to send it again
      lane            a class of emails with its own queue: urgent, normal, bulk
      tenant          an application or a customer; the emails of different tenants are separate
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (the arguments, or `sys.argv`); returns its exit code."""
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
    except UnicodeEncodeError:
        given = sys.argv[1:] if arguments is None else arguments
        if not (wrong := [each for each in given if _UNDECODED.search(each)]):
            raise
        say(f"dispatcher: The argument {wrong[0]!a} is not valid UTF-8.")
        return Exit.USAGE
    return int(result or Exit.DONE)


def _run(arguments: Sequence[str] | None) -> int | None:
    try:
        result: int | None = dispatcher.main(arguments, prog_name="dispatcher", standalone_mode=False)
    except OSError as error:
        innermost = error.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        if innermost is None or innermost.tb_frame.f_code is not click.echo.__code__:
            raise
        # click prints the help and the version with `echo`, so stdout cannot be written.
        raise unwritten(error) from error
    flush_data()
    return result


def program() -> int:
    """Runs `main` as the console script. If collection is still off (see `LazyGroup`), exits without clean-up."""
    try:
        code = main()
    finally:
        # Exempt all objects from the interpreter's last garbage collection, which would take a fifth of a short
        # command's run time.
        gc.freeze()
    if not gc.isenabled():
        with suppress(OSError, ValueError):  # the interpreter then exits with its clean-up, and reports the error
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # the clean-up takes 10 ms of a short command's 200 ms
    return code


def report(error: DispatcherError) -> Exit:
    """Prints an error and its remedy to stderr; returns the exit code."""
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
