"""What ends the start of a service: a line of its log, like everything that it says later."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from dispatcher.cli.exits import exit_of
from dispatcher.config import LOG_FORMATS, PREFIX
from dispatcher.errors import ConfigurationError, DispatcherError


@contextmanager
def starting() -> Iterator[None]:
    """Logs the error that ends the block, one line per mistake, and ends the command with the error's exit code.

    On a terminal the error passes, and the command line says it in words.
    """
    from dispatcher.telemetry import log

    # The settings may be what is mistaken, so the log begins before them.
    form = os.environ.get(f"{PREFIX}LOG_FORMAT", "")
    log.configure("info", form if form in LOG_FORMATS else "auto")
    try:
        yield
    except DispatcherError as error:
        if sys.stdout.isatty():
            raise
        mistakes = error.mistakes if isinstance(error, ConfigurationError) else [error.message]
        for mistake in mistakes:
            log.get_log().error("start.refused", reason=mistake, remedy=error.remedy)
        raise click.exceptions.Exit(exit_of(error)) from error
