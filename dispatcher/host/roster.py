"""The roster: who of a host's processes is there, and how he is; shared memory that every process of the host sees.

    parent   makes it before the first fork, gives each child a seat, and reads what the children say
    child    says in its own seat that it is up, that its loop works (a heartbeat), that it wants to be replaced, since
             when it waits for a commit or for RabbitMQ's confirms, when RabbitMQ last served it, and why it fails
    monitor  reads all of it: `unready` says in words what is not as it should be; `members` has the figures

Up means: it has everything that it needs of its own (settings, files, providers), it hears a stop, and it has tried its
server: it works, or knows that the server is away. RabbitMQ or PostgreSQL being away is no reason not to be up; that
one of them does not let it in is. Who ends before he is up could not boot.

Nothing is locked, because each 64-bit cell has one writer at a time and is written in one piece. The reason of a
failure is text; a reader may see a part of it while it is written.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

SEATS: Final = 1024
"""More than twice the most workers that a host may have: the predecessor and the successor of each."""


class _Cell(IntEnum):
    """What stands where in a seat's row; the first line is the parent's, the second the child's."""

    TAKEN, ROLE, NUMBER, PID, IS_ENDING, FAILED_BOOTS = range(6)
    IS_UP, BEATS, WANTS_SUCCESSOR = range(6, 9)
    AWAITS_COMMIT, AWAITS_CONFIRM, SERVED = range(9, 12)
    """Instants by `_now`; 0: never, or not now."""


_CELLS: Final = len(_Cell)
REASON_OCTETS: Final = 512


def _now() -> int:
    """Milliseconds of the monotonic clock, which all processes of a host share."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """One process, as the roster has it.

    Attributes:
        role: `worker`, `relay`, `monitor`.
        number: Its slot among those of its role.
        pid: None while it waits to be started.
        is_ending: It was told to end: replaced, removed, or with the whole host.
        failed_boots: How often in a row it ended before it was up.
        reason: Why its last start failed; nothing private.
        beats: Grows while its loop works.
        commit_wait_seconds: How long it has waited for a commit without any; None where it waits for none.
        confirm_wait_seconds: The same of RabbitMQ's confirms.
        served_seconds: How long ago RabbitMQ has confirmed something to it, or it has acked something; None if never.
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


class Roster:
    """The table of all seats; made once, by the parent."""

    def __init__(self, roles: Sequence[str]) -> None:
        self._roles = tuple(roles)
        self._cells = memoryview(mmap.mmap(-1, SEATS * _CELLS * 8)).cast("q")
        self._reasons = memoryview(mmap.mmap(-1, SEATS * REASON_OCTETS))

    def seat(self, role: str, number: int) -> Seat:
        """A free seat, taken from now on; for the parent."""
        at = next(at for at in range(0, SEATS * _CELLS, _CELLS) if not self._cells[at + _Cell.TAKEN])
        for cell in range(_CELLS):
            self._cells[at + cell] = 0
        self._cells[at + _Cell.ROLE] = self._roles.index(role)
        self._cells[at + _Cell.NUMBER] = number
        self._cells[at + _Cell.TAKEN] = 1
        seat = Seat(self._cells, at, self._reason(at))
        seat.note_reason("")
        return seat

    def _reason(self, at: int) -> memoryview:
        first = at // _CELLS * REASON_OCTETS
        return self._reasons[first : first + REASON_OCTETS]

    def members(self) -> list[Member]:
        """Everybody who runs or should."""
        return [self._member(at) for at in range(0, SEATS * _CELLS, _CELLS) if self._cells[at + _Cell.TAKEN]]

    def unready(self) -> list[str]:
        """A sentence for each process that should work and does not; empty where all is well."""
        return [_plight(member) for member in self.members() if not member.is_up and not member.is_ending]

    def _member(self, at: int) -> Member:
        row = self._cells[at : at + _CELLS]
        return Member(
            role=self._roles[row[_Cell.ROLE]],
            number=row[_Cell.NUMBER],
            pid=row[_Cell.PID] or None,
            is_up=bool(row[_Cell.IS_UP]),
            is_ending=bool(row[_Cell.IS_ENDING]),
            failed_boots=row[_Cell.FAILED_BOOTS],
            reason=_text(self._reason(at)),
            beats=row[_Cell.BEATS],
            commit_wait_seconds=_seconds_since(row[_Cell.AWAITS_COMMIT]),
            confirm_wait_seconds=_seconds_since(row[_Cell.AWAITS_CONFIRM]),
            served_seconds=_seconds_since(row[_Cell.SERVED]),
        )


def _text(octets: memoryview) -> str:
    return bytes(octets).rstrip(b"\0").decode("utf-8", "replace")


def _seconds_since(instant: int) -> float | None:
    return (_now() - instant) / 1000 if instant else None


class Wait:
    """How long a process has waited, in a cell of its seat. `begin` keeps the first instant until `end`."""

    def __init__(self, cells: memoryview[int], at: int) -> None:
        self._cells = cells
        self._at = at

    def begin(self) -> None:
        """It waits from now on, if it did not before."""
        if not self._cells[self._at]:
            self._cells[self._at] = _now()

    @property
    def seconds(self) -> float | None:
        """How long it has waited; None if it does not."""
        return _seconds_since(self._cells[self._at])

    def end(self) -> None:
        """An answer came, or nothing is waited for any more."""
        self._cells[self._at] = 0

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()


class Seat:
    """One process's row.

    Attributes:
        commit: Its wait for a commit; begun by the child.
        confirm: Its wait for RabbitMQ's confirms.
    """

    def __init__(self, cells: memoryview[int], at: int, reason: memoryview) -> None:
        self._cells = cells
        self._at = at
        self._reason = reason
        self.commit = Wait(cells, at + _Cell.AWAITS_COMMIT)
        self.confirm = Wait(cells, at + _Cell.AWAITS_CONFIRM)

    # What the child says.

    def up(self) -> None:
        """It works; a second call is harmless."""
        self._cells[self._at + _Cell.IS_UP] = 1

    def beat(self) -> None:
        """Its loop works."""
        self._cells[self._at + _Cell.BEATS] += 1

    def served(self) -> None:
        """RabbitMQ has just confirmed messages of this process, or taken its acks."""
        self._cells[self._at + _Cell.SERVED] = _now()

    def ask_for_successor(self) -> None:
        """It wants to be replaced, and works on until it is told to stop."""
        self._cells[self._at + _Cell.WANTS_SUCCESSOR] = 1

    def note_reason(self, words: str) -> None:
        """Stores why the process failed to start: a sentence that anybody may read."""
        octets = words.encode("utf-8", "replace")[:REASON_OCTETS]
        self._reason[:] = octets.ljust(REASON_OCTETS, b"\0")

    # What the parent says and reads.

    def begin(self) -> None:
        """A process is about to be forked for it: nothing that an earlier one said is true of this one."""
        for cell in (_Cell.IS_ENDING, *range(_Cell.IS_UP, _CELLS)):
            self._cells[self._at + cell] = 0

    def note_process(self, pid: int | None) -> None:
        """Who sits in it now."""
        self._cells[self._at + _Cell.PID] = pid or 0
        if pid is None:
            self._cells[self._at + _Cell.IS_UP] = 0
            self.commit.end()
            self.confirm.end()

    def note_ending(self) -> None:
        """Its process was told to end."""
        self._cells[self._at + _Cell.IS_ENDING] = 1

    def note_failed_boots(self, count: int) -> None:
        """How often in a row its processes ended before they were up."""
        self._cells[self._at + _Cell.FAILED_BOOTS] = count

    def leave(self) -> None:
        """The seat is free."""
        self._cells[self._at + _Cell.TAKEN] = 0

    @property
    def reason(self) -> str:
        """Why its process failed to start."""
        return _text(self._reason)

    @property
    def is_up(self) -> bool:
        """Whether its process works."""
        return bool(self._cells[self._at + _Cell.IS_UP])

    @property
    def beats(self) -> int:
        """A figure that changes while its process's loop works."""
        return self._cells[self._at + _Cell.BEATS]

    @property
    def wants_successor(self) -> bool:
        """Whether its process wants to be replaced."""
        return bool(self._cells[self._at + _Cell.WANTS_SUCCESSOR])


@dataclass(frozen=True, slots=True)
class Post:
    """What a process gets from the parent that forked it.

    Attributes:
        lifeline: A pipe of which the parent holds the other end; EOF means that it is gone.
        number: The process's slot: no two living children of one parent have the same, and a restart keeps it.
        seat: Where the process says how it is.
        roster: Everybody.
    """

    lifeline: int
    number: int
    seat: Seat
    roster: Roster


def _plight(member: Member) -> str:
    name = f"{member.role} {member.number}"
    if member.failed_boots:
        times = "once" if member.failed_boots == 1 else f"{member.failed_boots} times in a row"
        return (
            f"{name} could not boot, {times}: {member.reason}" if member.reason else f"{name} could not boot, {times}."
        )
    return f"{name} is starting." if member.pid else f"{name} waits to be started again."
