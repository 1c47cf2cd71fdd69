"""The exit codes of the command line."""

from __future__ import annotations

import signal
from enum import IntEnum

from dispatcher.errors import ConfigurationError, DispatcherError


class Exit(IntEnum):
    """How a command ended. The values are exit codes, on which scripts and supervisors rely."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    """The arguments are invalid; click uses this number."""
    PARTLY = 3
    """Only part of the work was done; stderr reports the part that was not."""
    BLOCKED = 75
    """EX_TEMPFAIL in sysexits.h: another session has locked a table for too long; a repetition may succeed."""
    BAD_CONFIGURATION = 78
    """EX_CONFIG in sysexits.h: a restart fails again until an operator corrects the settings or runs `init`."""
    INTERRUPTED = 130
    """Ctrl-C interrupted the command. Shells use the same number: 128 + SIGINT."""


def exit_of(error: DispatcherError) -> Exit:
    """The exit code of a command that ends with this error."""
    return Exit.BAD_CONFIGURATION if isinstance(error, ConfigurationError) else Exit.FAILED


def end_by_sigterm() -> None:
    """Makes SIGTERM raise `KeyboardInterrupt`, as Ctrl-C does, so that the command stops its child processes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
