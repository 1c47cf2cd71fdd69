"""`dispatcher api`: serves the HTTP API, in one process."""

from __future__ import annotations

from dataclasses import replace

import click

from dispatcher.cli.config import API_NEEDS
from dispatcher.cli.environment import load_settings
from dispatcher.cli.starting import starting
from dispatcher.config.values import api_listener
from dispatcher.errors import DispatcherError


@click.command("api")
@click.option("--address", metavar="HOST:PORT", help="Where to listen, instead of DISPATCHER_API_ADDRESS.")
@click.option("--share-port", is_flag=True, help="Let several processes listen there; the kernel spreads connections.")
def command(address: str | None, *, share_port: bool) -> int:
    """Accept emails over HTTP: makes them durable, announces them, answers. `dispatcher run` sends them.

    Needs DISPATCHER_DATABASE_URL and DISPATCHER_AMQP_URL, an `init` before, an API key (`dispatcher keys create`), and
    the extra `api`. For development, with DISPATCHER_API_ALLOW_ANONYMOUS=on the API needs no key on the loopback until
    the first key is created. It speaks plain HTTP: before others reach it, put a proxy with TLS in front. SIGTERM and
    Ctrl-C finish the requests that have begun.

    \b
    Examples:
      dispatcher api
      curl -i http://127.0.0.1:8025/v1/emails -H 'Authorization: Bearer ed_…' -H 'Idempotency-Key: hello-1' \\
           -H 'Content-Type: application/json' \\
           -d '{"from": "me@example.com", "to": "you@example.org", "subject": "Hello", "text": "It works."}'
      dispatcher api --address 127.0.0.1:8025 --share-port   # as often as you have cores

    Its pages: /docs, /openapi.json, /healthz.

    Exit codes: 0 stopped, 1 the address cannot be had or the extra is missing, 78 settings or tables are not fit, or
    there is no key.
    """
    with starting():
        return _serve(address, share_port=share_port)


def _serve(address: str | None, *, share_port: bool) -> int:
    settings = load_settings(*API_NEEDS)
    if address is not None:
        try:
            settings = replace(settings, api_address=api_listener(address))
        except ValueError as error:
            raise click.UsageError(f"--address {error}.") from None
    try:
        from dispatcher.api.server import listen, run_api
    except ModuleNotFoundError as error:
        raise DispatcherError(
            f"The HTTP API needs packages that are not installed ({error.name}).",
            remedy="Install them: pip install 'email-dispatcher[api]'",
        ) from None
    from setproctitle import setproctitle

    from dispatcher.supervisor.preflight import prepare_store
    from dispatcher.telemetry import log, tracing

    log.configure(settings.log_level, settings.log_format, worker="api")
    setproctitle("dispatcher: api")
    prepare_store(settings)
    tracing.prepare()
    with listen(settings, shares_port=share_port) as listener:
        return run_api(settings, listener)
