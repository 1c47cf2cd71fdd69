"""The process table of a host: shared memory with one row per process (a scoreboard).

    parent   creates the table before the first fork, gives each child a row, and reads what the children write
    child    writes into its row: that it is up, a heartbeat, a request for a replacement, since when it has waited for
             a commit or for RabbitMQ's confirms, the time of the last confirm from RabbitMQ or of the last ack to
             RabbitMQ, and why it failed to start
    monitor  reads all rows: `unready` describes problems in sentences, `statuses` returns the figures

A process is up when it has its resources (settings, files, providers), handles stop signals, and has tried to connect
to its server. It is up even if RabbitMQ or PostgreSQL is unreachable, but not if a server refuses its login. A process
that exits before it is up counts as a failed boot.

There are no locks: each 64-bit cell has one writer at a time and is written atomically. The failure reason is a text,
and a reader may see it half written.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from dispatcher.domain.values import dataclass

MAX_PROCESSES: Final = 1024
"""The number of rows. It is more than twice the largest number of workers per host: during a replacement, the old and
the new worker each have a row."""


class _Field(IntEnum):
    """The cells of a row. The parent writes the cells of the first line below, the child all other cells."""

    TAKEN, ROLE, NUMBER, PID, IS_ENDING, FAILED_BOOTS, STARTED, RESTARTS = range(8)
    IS_UP, BEATS, WANTS_SUCCESSOR = range(8, 11)
    AWAITS_COMMIT, AWAITS_CONFIRM, SERVED = range(11, 14)
    """Instants, as `_now` returns them. 0 means never, or that the process is not waiting."""


_FIELDS: Final = len(_Field)
REASON_OCTETS: Final = 512


def _now() -> int:
    """Milliseconds of the monotonic clock, the same in all processes of a host."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A snapshot of one row.

    The waits are None if the process does not wait; `served_seconds`, since its last confirm from or ack to RabbitMQ,
    is None before the first; `pid` and `age_seconds` are None while it waits to be started. `reason` says why the last
    start failed, and contains nothing private. `restarts` counts ends that the parent did not cause.
    """

    role: str
    number: int
    pid: int | None
    is_up: bool
    is_ending: bool
    failed_boots: int
    beats: int
    reason: str = ""
    commit_wait_seconds: float | None = None
    confirm_wait_seconds: float | None = None
    served_seconds: float | None = None
    age_seconds: float | None = None
    restarts: int = 0


class ProcessTable:
    """The table with the rows of all processes of a host. The parent creates the table."""

    def __init__(self, roles: Sequence[str]) -> None:
        self._roles = tuple(roles)
        self._cells = memoryview(mmap.mmap(-1, MAX_PROCESSES * _FIELDS * 8)).cast("q")
        self._reasons = memoryview(mmap.mmap(-1, MAX_PROCESSES * REASON_OCTETS))

    def take_slot(self, role: str, number: int) -> ProcessSlot:
        """Takes a free row, and clears it. Only the parent calls this."""
        at = next(at for at in range(0, MAX_PROCESSES * _FIELDS, _FIELDS) if not self._cells[at + _Field.TAKEN])
        for cell in range(_FIELDS):
            self._cells[at + cell] = 0
        self._cells[at + _Field.ROLE] = self._roles.index(role)
        self._cells[at + _Field.NUMBER] = number
        self._cells[at + _Field.TAKEN] = 1
        process_slot = ProcessSlot(self._cells, at, self._reason(at))
        process_slot.note_reason("")
        return process_slot

    def _reason(self, at: int) -> memoryview:
        first = at // _FIELDS * REASON_OCTETS
        return self._reasons[first : first + REASON_OCTETS]

    def statuses(self) -> list[ProcessStatus]:
        return [self._status(at) for at in range(0, MAX_PROCESSES * _FIELDS, _FIELDS) if self._cells[at + _Field.TAKEN]]

    def unready(self) -> list[str]:
        """A sentence for each process that should be up but is not; empty if all are up."""
        return [_problem(each) for each in self.statuses() if not each.is_up and not each.is_ending]

    def _status(self, at: int) -> ProcessStatus:
        row = self._cells[at : at + _FIELDS]
        return ProcessStatus(
            role=self._roles[row[_Field.ROLE]],
            number=row[_Field.NUMBER],
            pid=row[_Field.PID] or None,
            is_up=bool(row[_Field.IS_UP]),
            is_ending=bool(row[_Field.IS_ENDING]),
            failed_boots=row[_Field.FAILED_BOOTS],
            reason=_text(self._reason(at)),
            beats=row[_Field.BEATS],
            commit_wait_seconds=_seconds_since(row[_Field.AWAITS_COMMIT]),
            confirm_wait_seconds=_seconds_since(row[_Field.AWAITS_CONFIRM]),
            served_seconds=_seconds_since(row[_Field.SERVED]),
            age_seconds=_seconds_since(row[_Field.STARTED]) if row[_Field.PID] else None,
            restarts=row[_Field.RESTARTS],
        )


def _text(octets: memoryview) -> str:
    return bytes(octets).rstrip(b"\0").decode("utf-8", "replace")


def _seconds_since(instant: int) -> float | None:
    return (_now() - instant) / 1000 if instant else None


class Wait:
    """Measures how long a process waits, and writes the start of the wait into a cell of the process's row."""

    def __init__(self, cells: memoryview[int], at: int) -> None:
        self._cells = cells
        self._at = at

    def begin(self) -> None:
        """Notes that the process waits from now on, if it does not wait already."""
        if not self._cells[self._at]:
            self._cells[self._at] = _now()

    @property
    def seconds(self) -> float | None:
        return _seconds_since(self._cells[self._at])

    def end(self) -> None:
        """Notes that the process no longer waits. Idempotent."""
        self._cells[self._at] = 0

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


class ProcessSlot:
    """One process's row. `commit` and `confirm` are the child's waits for a commit, and for RabbitMQ's confirms."""

    def __init__(self, cells: memoryview[int], at: int, reason: memoryview) -> None:
        self._cells = cells
        self._at = at
        self._reason = reason
        self.commit = Wait(cells, at + _Field.AWAITS_COMMIT)
        self.confirm = Wait(cells, at + _Field.AWAITS_CONFIRM)

    # Methods that the child calls.

    def mark_up(self) -> None:
        self._cells[self._at + _Field.IS_UP] = 1

    def beat(self) -> None:
        self._cells[self._at + _Field.BEATS] += 1

    def note_served(self) -> None:
        self._cells[self._at + _Field.SERVED] = _now()

    def ask_for_successor(self) -> None:
        """Requests a replacement from the parent. The process keeps running until the parent stops it."""
        self._cells[self._at + _Field.WANTS_SUCCESSOR] = 1

    def note_reason(self, words: str) -> None:
        """Stores why the process failed to start. Status pages show this text: it must contain nothing private."""
        octets = words.encode("utf-8", "replace")[:REASON_OCTETS]
        self._reason[:] = octets.ljust(REASON_OCTETS, b"\0")

    # Methods that the parent calls.

    def begin(self) -> None:
        """Resets the row before a fork, because the previous process's values do not apply to the new process."""
        for cell in (_Field.IS_ENDING, *range(_Field.IS_UP, _FIELDS)):
            self._cells[self._at + cell] = 0

    def note_process(self, pid: int | None) -> None:
        self._cells[self._at + _Field.PID] = pid or 0
        self._cells[self._at + _Field.STARTED] = _now()
        if pid is None:
            self._cells[self._at + _Field.IS_UP] = 0
            self.commit.end()
            self.confirm.end()

    def note_ending(self) -> None:
        self._cells[self._at + _Field.IS_ENDING] = 1

    def note_failed_boots(self, count: int) -> None:
        self._cells[self._at + _Field.FAILED_BOOTS] = count

    def note_restart(self) -> None:
        self._cells[self._at + _Field.RESTARTS] += 1

    def free(self) -> None:
        self._cells[self._at + _Field.TAKEN] = 0

    @property
    def reason(self) -> str:
        return _text(self._reason)

    @property
    def is_up(self) -> bool:
        return bool(self._cells[self._at + _Field.IS_UP])

    @property
    def beats(self) -> int:
        return self._cells[self._at + _Field.BEATS]

    @property
    def wants_successor(self) -> bool:
        return bool(self._cells[self._at + _Field.WANTS_SUCCESSOR])


@dataclass(frozen=True, slots=True)
class ChildContext:
    """The values that the parent passes to a forked child. EOF on `lifeline` means that the parent has exited. `number`
    is unique among the live children, and kept across restarts."""

    lifeline: int
    number: int
    process_slot: ProcessSlot
    process_table: ProcessTable


def _problem(process: ProcessStatus) -> str:
    name = f"{process.role} {process.number}"
    if process.failed_boots:
        times = "once" if process.failed_boots == 1 else f"{process.failed_boots} times in a row"
        return (
            f"{name} could not boot, {times}: {process.reason}"
            if process.reason
            else f"{name} could not boot, {times}."
        )
    return f"{name} is starting." if process.pid else f"{name} is waiting to be restarted."
