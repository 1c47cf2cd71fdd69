"""The host's monotonic clock, and the id of the host's last boot."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path


def steady_clock() -> float:
    """Seconds since the host's last boot (CLOCK_BOOTTIME), the same for all processes of the host.

    The clock also advances while the host is suspended. So a lease never looks younger than it is.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def seconds_to_tick(interval_seconds: float) -> float:
    """The wait, of about the interval, until a multiple of it: the timers of a process then end in one wake-up."""
    now = asyncio.get_running_loop().time()
    return interval_seconds * math.ceil(now / interval_seconds + 0.5) - now


def boot_id() -> str:
    """The kernel's id of the last boot. If it is empty, every ledger is treated as if it might lack its last writes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
