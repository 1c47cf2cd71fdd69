"""The controlling terminal of this process, if any."""

from __future__ import annotations

import os


def has_terminal() -> bool:
    """Whether Ctrl-C in a terminal would reach this process. False after the terminal is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
