"""The host's steady clock, and the name of the host's last start."""

from __future__ import annotations

import time
from pathlib import Path


def steady_clock() -> float:
    """Seconds that go on while the host sleeps, so that a lease never looks younger than it is.

    The same for all processes of the host.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The kernel's name for the host's last start; empty where it tells none, and then no ledger proves anything."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
