"""Logs the errors that stop `dispatcher run` or `dispatcher api` during startup."""

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
def log_startup_errors() -> Iterator[None]:
    """Logs a `DispatcherError` that the block raises, one line per mistake, and exits with the error's exit code.

    If stdout is a terminal, the error propagates instead, and the command line prints it.
    """
    from dispatcher.telemetry import log

    # Configure logging before the settings are read, because the settings may be invalid.
    form = os.environ.get(f"{PREFIX}LOG_FORMAT", "")
    log.configure("info", form if form in LOG_FORMATS else "auto")
    try:
        yield
    except DispatcherError as error:
        if sys.stdout.isatty():
            raise
        mistakes = error.mistakes if isinstance(error, ConfigurationError) else [error.message]
        for mistake in mistakes:
            log.get_log().error("startup.failed", reason=mistake, remedy=error.remedy)
        raise click.exceptions.Exit(exit_of(error)) from error
