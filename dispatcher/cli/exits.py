"""What the command line's exit codes mean."""

from __future__ import annotations

import signal
from enum import IntEnum

from dispatcher.errors import ConfigurationError, DispatcherError


class Exit(IntEnum):
    """How a command ended; scripts and supervisors rely on the numbers."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    """The arguments make no sense; click's own number."""
    PARTLY = 3
    """Some of it was done; what was not is said on stderr."""
    BAD_CONFIGURATION = 78
    """EX_CONFIG of sysexits.h: trying again changes nothing until an operator mends the settings or runs `init`."""
    INTERRUPTED = 130
    """Ctrl-C: 128 + SIGINT, as shells count."""


def exit_of(error: DispatcherError) -> Exit:
    """The exit code of a command that ends with this error."""
    return Exit.BAD_CONFIGURATION if isinstance(error, ConfigurationError) else Exit.FAILED


def end_by_sigterm() -> None:
    """From now on SIGTERM ends this process as Ctrl-C does, so that nothing that it started is left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
