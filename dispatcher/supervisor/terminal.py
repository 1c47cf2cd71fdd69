"""The terminal that a process was started on, if it was."""

from __future__ import annotations

import os


def has_terminal() -> bool:
    """Whether there is a terminal whose Ctrl-C would reach us; not so any more once it was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
