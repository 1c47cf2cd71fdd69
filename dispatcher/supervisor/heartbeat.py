"""Who hangs: a process whose working loop has said nothing for too long.

What counts is the time that the parent has seen pass, look by look, and not what a clock says: a host that was
suspended, or a container that was frozen, stopped the parent as well, and costs nobody his life.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from dispatcher.supervisor.supervised import Process

LOOK_SECONDS: Final = 1.0
BOOT_SECONDS: Final = 60.0
"""Before the first heartbeat there is nothing to lose, and a loaded host may be slow."""
ABORT_SECONDS: Final = 2.0
"""For the traceback of all threads, before SIGKILL."""


class HangWatch:
    """Measures the silence of processes."""

    def __init__(self, hang_seconds: float) -> None:
        """
        Args:
            hang_seconds: The longest silence; 0 for any.
        """
        self._hang_seconds = hang_seconds
        self.look_seconds = min(LOOK_SECONDS, hang_seconds / 4) if hang_seconds else LOOK_SECONDS
        self._looked_at = time.monotonic()

    def find_hung(self, processes: Iterable[Process]) -> list[Process]:
        """Those that have been silent for too long and were not aborted yet; to be called every `look_seconds`."""
        now = time.monotonic()
        passed_seconds, self._looked_at = min(now - self._looked_at, 2 * self.look_seconds), now
        return [process for process in processes if process.pid and self._is_hung(process, passed_seconds)]

    def _is_hung(self, process: Process, passed_seconds: float) -> bool:
        beats = process.process_slot.beats
        if beats != process.beats:
            process.beats, process.silent_seconds = beats, 0.0
        else:
            process.silent_seconds += passed_seconds
        longest = self._hang_seconds if beats else max(self._hang_seconds, BOOT_SECONDS)
        return self._hang_seconds > 0 and not process.is_hung and process.silent_seconds > longest
