"""What `dispatcher api` and `dispatcher smtp` have in common: they check the settings, listen, and serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from socket import socket
from typing import TYPE_CHECKING, Any

import click

from dispatcher.config.setting import PREFIX
from dispatcher.config.values import api_listener

if TYPE_CHECKING:
    from dispatcher.config import Settings


def with_address(settings: Settings, field: str, address: str | None) -> Settings:
    """The settings with the address of the option `--address`, if it was given."""
    try:
        given: dict[str, Any] = {} if address is None else {field: api_listener(address)}
        return replace(settings, **given)
    except ValueError as error:
        raise click.UsageError(f"--address {error}.") from None


def serve(
    settings: Settings, name: str, field: str, run: Callable[[Settings, socket], int], *, shares_port: bool
) -> int:
    """Runs the process `name` with a listener at the address in this field of the settings. Returns the exit code."""
    from setproctitle import setproctitle

    from dispatcher.admission.process import listen
    from dispatcher.supervisor.preflight import prepare_store
    from dispatcher.telemetry import log, tracing

    log.configure(settings.log_level, settings.log_format, worker=name)
    setproctitle(f"dispatcher: {name}")
    prepare_store(settings)
    tracing.prepare()
    with listen(getattr(settings, field), setting=f"{PREFIX}{field.upper()}", shares_port=shares_port) as listener:
        return run(settings, listener)
