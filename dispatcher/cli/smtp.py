"""`dispatcher smtp`: serves SMTP for clients with an API key, in one process."""

from __future__ import annotations

import click

from dispatcher.cli.environment import API_NEEDS, load_settings
from dispatcher.cli.serving import serve, with_address
from dispatcher.cli.startup_errors import log_startup_errors
from dispatcher.config.rules import unprotected_submission
from dispatcher.errors import ConfigurationError, DispatcherError


@click.command("smtp")
@click.option("--address", metavar="HOST:PORT", help="Listen here.  [default: DISPATCHER_SUBMISSION_ADDRESS]")
@click.option(
    "--share-port",
    is_flag=True,
    help="Let several processes listen on the same port (SO_REUSEPORT); the kernel distributes the connections.",
)
def command(address: str | None, *, share_port: bool) -> int:
    """Serve SMTP, to accept emails from programs that cannot use the HTTP API. `dispatcher run` sends them.

    \b
    Examples:
      dispatcher smtp
      swaks --server 127.0.0.1:2525 --auth-user shop --auth-password ed_… \\
            --from me@example.com --to you@example.org
      dispatcher smtp --address 127.0.0.1:2525 --share-port   # start one such process per CPU core

    A client logs in with an API key as its password; the user name may be any text. The server replies 250 after the
    email is committed to PostgreSQL. A message that a client submits again makes no second email.

    Needs DISPATCHER_DATABASE_URL and DISPATCHER_AMQP_URL, an API key (`dispatcher keys create`), and the Python extra
    `email-dispatcher[smtp]`. Run `dispatcher init` first. On addresses other than the loopback's, it needs TLS:
    DISPATCHER_SUBMISSION_TLS. docs/smtp.md is the guide.

    On SIGTERM or Ctrl-C the process finishes the messages in progress, then exits.

    Exit codes: 0 stopped; 1 the process cannot listen at the address, or the Python extra is missing; 78 settings or
    tables are invalid, or there is no key.
    """
    with log_startup_errors():
        return _serve(address, share_port=share_port)


def _serve(address: str | None, *, share_port: bool) -> int:
    settings = with_address(load_settings(*API_NEEDS), "submission_address", address)
    if mistakes := unprotected_submission(settings):
        raise ConfigurationError(mistakes)
    try:
        from dispatcher.smtp_door.server import run_smtp, server_context
    except ModuleNotFoundError as error:
        raise DispatcherError(
            f"The SMTP server needs a package that is not installed: {error.name}.",
            remedy="Run: pip install 'email-dispatcher[smtp]'",
        ) from None
    server_context(settings)  # refuses a wrong certificate before the database is asked
    return serve(settings, "smtp", "submission_address", run_smtp, shares_port=share_port)
