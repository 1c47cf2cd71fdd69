"""The parent's record of a child process, why the process ends, and the wait before it is restarted."""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import Final

from dispatcher.domain.values import dataclass, field, replace
from dispatcher.host.process_table import ProcessSlot
from dispatcher.supervisor.child import Entry

LONGEST_WAIT_SECONDS: Final = 30.0
STEADY_SECONDS: Final = 10.0
"""A process that ran for this long was healthy, so its next end counts as the first end in a row."""


class Ending(StrEnum):
    """Why a process ended; the `reason` of the log event `process.exited`."""

    # The process ended by itself, and is restarted.
    CRASHED = "crashed"
    COULD_NOT_BOOT = "could_not_boot"  # ended before it was up
    HUNG = "hung"  # the process's loop hung, and the parent aborted the process
    STOPPED = "stopped"  # exit code 0, although the parent did not stop the process

    # The parent stopped the process.
    RELOADED = "reloaded"
    RECYCLED = "recycled"
    SCALED_DOWN = "scaled_down"
    DRAINED = "drained"  # the whole host drains


@dataclass(frozen=True, slots=True)
class Restarts:
    """Counts how often a process has ended since it was last healthy, or in its boot; calculates the wait before its
    next start.

    The first `free` ends are followed by a restart without a wait. The wait then doubles with each further end.
    """

    first_wait_seconds: float = 0.1
    free: int = 1
    in_a_row: int = 0

    def after(self, lived_seconds: float = 0.0) -> Restarts:
        """The count after one more end. If the process ran long enough to be healthy, counts from 1 again."""
        return replace(self, in_a_row=1 if lived_seconds >= STEADY_SECONDS else self.in_a_row + 1)

    @property
    def wait_seconds(self) -> float:
        doublings = self.in_a_row - 1 - self.free
        # Bound the exponent, so that the float cannot overflow.
        return 0.0 if doublings < 0 else min(self.first_wait_seconds * 2.0 ** min(doublings, 64), LONGEST_WAIT_SECONDS)


BOOTS: Final = Restarts(first_wait_seconds=0.5, free=0)
"""The count for a process that was never up. An immediate restart would hardly help: an operator has to fix
something."""


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process that the parent keeps running. `count` is None if exactly one must run at any time. If
    `stops_last`, its processes stop only after all others."""

    name: str
    entry: Entry
    count: int | None = None
    stops_last: bool = False
    restarts: Restarts = field(default_factory=Restarts)
    boots: Restarts = BOOTS


@dataclass(slots=True, eq=False)
class Process:
    """A slot of a role, and its current process. When the process is restarted, the slot stays the same.

    While it waits for its start, `pid` is None; while it runs, `start_at` is None. `generation` is how many reloads had
    begun at the fork. `ending` is None if the parent did not stop it.
    """

    role: Role
    number: int
    process_slot: ProcessSlot
    restarts: Restarts
    boots: Restarts
    pid: int | None = None
    started_at: float = 0.0
    start_at: float | None = 0.0
    generation: int = 0
    ending: Ending | None = None
    kill_at: float | None = None
    is_hung: bool = False
    beats: int = 0
    silent_seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.role.name if self.role.count is None else f"{self.role.name} {self.number}"

    def note_start(self, pid: int, now: float, generation: int) -> None:
        self.pid, self.started_at, self.start_at, self.generation = pid, now, None, generation
        self.is_hung, self.beats, self.silent_seconds = False, 0, 0.0
        self.process_slot.note_process(pid)

    def kill_by(self, instant: float) -> None:
        """Kills the process at this time, unless an earlier time is set."""
        self.kill_at = instant if self.kill_at is None else min(self.kill_at, instant)

    def ending_of(self, exit_code: int | None) -> Ending:
        """Why the process ended by itself. `exit_code` is None if the process could not be forked."""
        if self.is_hung:
            return Ending.HUNG
        if not self.process_slot.is_up:
            return Ending.COULD_NOT_BOOT
        return Ending.CRASHED if exit_code else Ending.STOPPED

    def note_exit(self, now: float) -> None:
        """Records that the process has ended, and sets the time of its next start."""
        if self.process_slot.is_up:
            self.restarts, self.boots = self.restarts.after(now - self.started_at), self.role.boots
            wait_seconds = self.restarts.wait_seconds
        else:
            self.boots = self.boots.after()
            wait_seconds = self.boots.wait_seconds
        self.pid, self.kill_at, self.start_at = None, None, now + wait_seconds
        self.process_slot.note_process(None)
        self.process_slot.note_failed_boots(self.boots.in_a_row)


def describe_exit(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit {exit_code}"
    number = -exit_code  # Python's enum has no real-time signals
    return f"signal {signal.Signals(number).name if number in set(signal.Signals) else number}"
