"""One child, as the parent sees it, and why it ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum

from dispatcher.host.process_table import ProcessSlot
from dispatcher.supervisor.child import Entry
from dispatcher.supervisor.restarts import BOOTS, Restarts


class Ending(StrEnum):
    """Why a process ended; the `reason` of `process.exited`."""

    # By itself; it is started again.
    CRASHED = "crashed"
    COULD_NOT_BOOT = "could_not_boot"  # ended before it was up
    HUNG = "hung"  # its loop stood still, and we aborted it
    STOPPED = "stopped"  # exit 0, so that somebody else told it to stop

    # Because we told it to.
    RELOADED = "reloaded"
    RECYCLED = "recycled"
    SCALED_DOWN = "scaled_down"
    DRAINED = "drained"  # with the whole host


@dataclass(frozen=True, slots=True)
class Role:
    """What the parent keeps running.

    Attributes:
        name: Its name in logs and process titles.
        entry: What its processes run.
        count: How many processes; more may be added. None: there is exactly one at any time.
        stops_last: Ends only when the others have: it settles what they leave, or watches them.
    """

    name: str
    entry: Entry
    count: int | None = None
    stops_last: bool = False
    restarts: Restarts = field(default_factory=Restarts)
    boots: Restarts = BOOTS


@dataclass(slots=True, eq=False)
class Process:
    """A slot of a role, and the process that has it now.

    Attributes:
        number: The slot's; no two living processes of a role have the same.
        pid: None while it waits to be started.
        start_at: When it is due to be started; None while it runs.
        generation: Of the settings that it was forked with.
        ending: Why it was told to end; None if it was not.
        kill_at: When it has had its time to end.
        is_hung: Its loop stood still, and it was aborted.
        silent_seconds: How long its heartbeat has not changed, of `beats`.
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
        """As logs and process titles have it."""
        return self.role.name if self.role.count is None else f"{self.role.name} {self.number}"

    def began(self, pid: int, now: float, generation: int) -> None:
        """It was forked."""
        self.pid, self.started_at, self.start_at, self.generation = pid, now, None, generation
        self.is_hung, self.beats, self.silent_seconds = False, 0, 0.0
        self.process_slot.note_process(pid)

    def kill_by(self, instant: float) -> None:
        """It has to end by then, or earlier if it had to before."""
        self.kill_at = instant if self.kill_at is None else min(self.kill_at, instant)

    def end_of(self, exit_code: int | None) -> Ending:
        """Why it ended by itself; None for a process that could not even be forked."""
        if self.is_hung:
            return Ending.HUNG
        if not self.process_slot.is_up:
            return Ending.COULD_NOT_BOOT
        return Ending.CRASHED if exit_code else Ending.STOPPED

    def ended(self, now: float) -> None:
        """It has no process any more; from now on it knows when it is due again."""
        if self.process_slot.is_up:
            self.restarts, self.boots = self.restarts.after(now - self.started_at), self.role.boots
            wait_seconds = self.restarts.wait_seconds
        else:
            self.boots = self.boots.after()
            wait_seconds = self.boots.wait_seconds
        self.pid, self.kill_at, self.start_at = None, None, now + wait_seconds
        self.process_slot.note_process(None)
        self.process_slot.note_failed_boots(self.boots.in_a_row)


def words_of(exit_code: int) -> str:
    """How a process ended, in words; a negative code is a signal's."""
    return f"signal {_signal_name(-exit_code)}" if exit_code < 0 else f"exit {exit_code}"


def _signal_name(number: int) -> str:
    # Real-time signals have numbers only.
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)
