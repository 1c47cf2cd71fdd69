"""Detects hung processes: processes whose event loop has sent no heartbeat for too long.

The parent measures how long each process has sent no heartbeat. If the host is suspended or the container frozen, no
process can send heartbeats, but the clock continues. So each check adds at most two check intervals to the measured
time, and no process is killed because of such an interruption.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from dispatcher.supervisor.supervised import Process

CHECK_SECONDS: Final = 1.0
BOOT_SECONDS: Final = 60.0
"""A process may take at least this long until its first heartbeat, because a start can be slow on a loaded host. Until
then, the process has leased no emails."""
ABORT_SECONDS: Final = 2.0
"""The time that a hung process has to print the traceback of all its threads, before SIGKILL."""


class HangWatch:
    """Measures how long processes have sent no heartbeat. `hang_seconds`: the longest such time; 0 disables the
    check."""

    def __init__(self, hang_seconds: float) -> None:
        self._hang_seconds = hang_seconds
        self.check_seconds = min(CHECK_SECONDS, hang_seconds / 4) if hang_seconds else CHECK_SECONDS
        self._checked_at = time.monotonic()

    def find_hung(self, processes: Iterable[Process]) -> list[Process]:
        """Returns the processes that have hung for too long and are not yet aborted. Call every `check_seconds`."""
        now = time.monotonic()
        passed_seconds, self._checked_at = min(now - self._checked_at, 2 * self.check_seconds), now
        return [process for process in processes if process.pid and self._is_hung(process, passed_seconds)]

    def _is_hung(self, process: Process, passed_seconds: float) -> bool:
        beats = process.process_slot.beats
        if beats != process.beats:
            process.beats, process.silent_seconds = beats, 0.0
        else:
            process.silent_seconds += passed_seconds
        longest = self._hang_seconds if beats else max(self._hang_seconds, BOOT_SECONDS)
        return self._hang_seconds > 0 and not process.is_hung and process.silent_seconds > longest
