"""`dispatcher api`: serves the HTTP API, in one process."""

from __future__ import annotations

import click

from dispatcher.cli.environment import API_NEEDS, load_settings, read_settings
from dispatcher.cli.serving import serve, with_address
from dispatcher.cli.startup_errors import log_startup_errors
from dispatcher.config import Settings
from dispatcher.domain.accounts import provider_of
from dispatcher.errors import DispatcherError
from dispatcher.providers.capture import NAME as CAPTURE


@click.command("api")
@click.option("--address", metavar="HOST:PORT", help="Listen here.  [default: DISPATCHER_API_ADDRESS]")
@click.option(
    "--share-port",
    is_flag=True,
    help="Let several processes listen on the same port (SO_REUSEPORT); the kernel distributes the connections.",
)
def command(address: str | None, *, share_port: bool) -> int:
    """Serve the HTTP API, which accepts emails. `dispatcher run` sends them.

    \b
    Examples:
      dispatcher api
      curl -i http://127.0.0.1:8025/v1/emails -H 'Authorization: Bearer ed_…' -H 'Idempotency-Key: hello-1' \\
           -H 'Content-Type: application/json' \\
           -d '{"from": "me@example.com", "to": "you@example.org", "subject": "Hello", "text": "It works."}'
      dispatcher api --address 127.0.0.1:8025 --share-port   # start one such process per CPU core

    The API responds after the email is committed to PostgreSQL. It then publishes the email's message to RabbitMQ
    itself, without waiting for the relay.

    Needs DISPATCHER_DATABASE_URL and DISPATCHER_AMQP_URL, an API key (`dispatcher keys create`), and the Python extra
    `email-dispatcher[api]`. Run `dispatcher init` first. For development, DISPATCHER_API_ALLOW_ANONYMOUS=on allows
    requests without a key on the loopback interface, until the first key is created.

    The process speaks plain HTTP: put a proxy with TLS in front of it. On SIGTERM or Ctrl-C it finishes the requests in
    progress, then exits.

    Pages: /docs, /openapi.json, /healthz; with DISPATCHER_OPS=on also /ops, the operators' page.

    Exit codes: 0 stopped; 1 the API cannot listen at the address, or the Python extra is missing; 78 settings or tables
    are invalid, or there is no key.
    """
    with log_startup_errors():
        return _serve(address, share_port=share_port)


def api_settings() -> Settings:
    """The API's settings. Reads providers' own settings only if the API needs them, because providers load slowly."""
    settings = load_settings(*API_NEEDS)
    # Two parts of the API need providers' own settings. The operators' page needs the folders of captured emails and
    # SMS. The check of Twilio's callbacks needs Twilio's token.
    if settings.sms_providers or (settings.ops and CAPTURE in map(provider_of, settings.providers)):
        return read_settings(*API_NEEDS, reads_own=True)
    return settings


def _serve(address: str | None, *, share_port: bool) -> int:
    settings = with_address(api_settings(), "api_address", address)
    try:
        from dispatcher.api.server import run_api
    except ModuleNotFoundError as error:
        raise DispatcherError(
            f"The HTTP API needs a package that is not installed: {error.name}.",
            remedy="Run: pip install 'email-dispatcher[api]'",
        ) from None
    return serve(settings, "api", "api_address", run_api, shares_port=share_port)
