"""The in-flight ledger: what of a worker was physically on the wire, readable after the worker's death.

Each worker owns one small memory-mapped file in the run directory. Before the first byte that could cause acceptance
leaves, a slot says *on the wire*; when the answer arrives it says *answered*, with the answer; once that is recorded in
the database the slot is empty again. Each write costs some microseconds, and outlives the process (not the host).

    empty ──leaving──▶ on the wire ──answer──▶ answered ──clear──▶ empty
      ▲                     │                                        │
      └──── torn write ─────┘ (a slot's state byte is written after its part, and each part has a checksum:
                               a torn *on the wire* has not left yet, a torn *answered* is still on the wire)

A ledger whose file lock is free belongs to a dead worker. The relay settles it: answered → recorded as answered, on
the wire → uncertain, by policy; every other lease of that worker → released, because nothing of it left. A ledger of
before the host's last start proves nothing of what it does not name: what was written last may never have reached the
disk. Those leases are left to the rescue. A ledger also names the database that its leases are in, since the settings
of a host may come to name another one: there its emails are unknown, and nothing of it is settled or deleted.

A ledger whose lock is held belongs to a living worker, perhaps one that is frozen (stopped, swapped out) while its
leases run out. To take those away the relay must know that nothing of them left, and that nothing will. Each side
writes before it reads, so no clock has to be trusted:

    worker   1 writes the slot *on the wire*   2 reads `voided_at`: a lease that was last confirmed before it is void,
               so the slot is emptied and nothing has left   3 the first byte leaves
    relay    1 finds expired leases   2 writes `voided_at`   3 waits until that is seen   4 reads the slots
               5 releases what no slot names, unless it was renewed since 1

If the slot is not there at the relay's 4, the worker's 2 comes after the relay's 2, and finds the lease void. A worker
that wakes anywhere in between loses cleanly: at its own 2, or at the lease token. If it was frozen after its 2, the
slot says so.

Rendering an email can kill its worker, natively or by the memory that it takes. What is being rendered stands in the
ledger as well, so that a death has a suspect.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from pathlib import Path
from uuid import UUID
from zlib import crc32

from dispatcher.domain.outcome import Outcome
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import DispatcherError
from dispatcher.host.clock import boot_id
from dispatcher.host.ledger_format import (
    ANSWER_AT,
    ANSWERED,
    CHECKSUM,
    DATABASE_AT,
    EMPTY,
    HEADER_BYTES,
    INODE,
    INODE_AT,
    NOT_RENDERING,
    ON_THE_WIRE,
    POLICIES,
    RENDERING,
    RENDERING_AT,
    RENDERINGS,
    SLOT_BYTES,
    SUFFIX,
    VOIDED,
    VOIDED_AT,
    WIRE,
    WIRE_AT,
    file_octets,
    pack_answer,
    pack_header,
)


class Ledger:
    """A worker's own ledger. Not safe for use from several threads, but for what is said of rendering.

    Attributes:
        is_named: It names its database.
    """

    def __init__(self, folder: Path, *, worker: str, slot: str, slots: int, boot: str | None = None) -> None:
        """Creates the file and locks it until this process ends.

        Args:
            folder: The run directory; made if it is missing.
            slots: How many attempts may be in flight at once.
            boot: Which start of the host it belongs to; None for this one.

        Raises:
            DispatcherError: the file cannot be made, for example on a full disk.
        """
        self.path = folder / f"{worker.replace('/', '_')}{SUFFIX}"
        self._slots = slots
        self._free = deque(range(slots))
        self._is_left_to_relay = False
        self._renderings = deque(range(RENDERINGS))
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._map = _create(self.path, pack_header(worker, slot, slots, boot_id() if boot is None else boot), slots)
            self._found = self.path.stat()
        except OSError as error:
            raise DispatcherError(
                f"The in-flight ledger cannot be made in the run directory: {error.strerror}.",
                remedy="Make room on its disk, let this user write there, or set DISPATCHER_RUN_DIR to another folder.",
            ) from error
        self.is_named = False

    def name_database(self, database_id: UUID) -> None:
        """Writes down which database the leases are in; to be called before the first one."""
        self._write(DATABASE_AT, database_id.bytes)
        self.is_named = True

    def leaving(
        self,
        email_id: UUID,
        lease_token: int,
        attempt_number: int,
        *,
        provider: str,
        started_at: float,
        policy: OnUncertain,
    ) -> int:
        """Writes down that an attempt goes on the wire now; returns its slot.

        Raises:
            IndexError: every slot is taken; nothing may leave.
        """
        slot = self._free.popleft()
        at = HEADER_BYTES + slot * SLOT_BYTES
        part = WIRE.pack(
            email_id.bytes, lease_token, attempt_number, started_at, POLICIES.index(policy), provider.encode()[:24]
        )
        self._write(at + WIRE_AT, part)
        self._map[at] = ON_THE_WIRE
        return slot

    def answered(self, slot: int, outcome: Outcome, *, finished_at: float) -> None:
        """Writes down the answer of the attempt in that slot."""
        at = HEADER_BYTES + slot * SLOT_BYTES
        # Its checksum goes on from the flight's: the relay may read while a slot passes from one email to the next, and
        # must not take one's answer for the other's.
        (flight,) = CHECKSUM.unpack_from(self._map, at + WIRE_AT + WIRE.size)
        self._write(at + ANSWER_AT, pack_answer(outcome, finished_at), begun=flight)
        self._map[at] = ANSWERED

    def clear(self, slot: int) -> None:
        """The answer is recorded in the database: the slot is free."""
        self._map[HEADER_BYTES + slot * SLOT_BYTES] = EMPTY
        self._free.append(slot)

    @property
    def voided_at(self) -> float:
        """When the relay last voided leases, by `steady_clock`: look after `leaving`, and before the first byte."""
        return float(VOIDED.unpack_from(self._map, VOIDED_AT)[0])

    @property
    def is_in_place(self) -> bool:
        """Whether the relay would find this ledger by its path: the file was not deleted or replaced."""
        try:
            return os.path.samestat(self.path.stat(), self._found)
        except OSError:
            return False

    def begin_rendering(self, email_id: UUID, lease_token: int) -> int | None:
        """Writes down who is to blame if this process dies now; None where too many are rendered at once."""
        try:
            place = self._renderings.pop()
        except IndexError:
            return None
        RENDERING.pack_into(self._map, RENDERING_AT + place * RENDERING.size, email_id.bytes, lease_token)
        return place

    def end_rendering(self, place: int | None) -> None:
        """Takes back what `begin_rendering` wrote."""
        if place is not None:
            at = RENDERING_AT + place * RENDERING.size
            self._map[at : at + RENDERING.size] = NOT_RENDERING
            self._renderings.append(place)

    def leave_to_relay(self) -> None:
        """Keeps the file when the worker ends.

        PostgreSQL may still commit a lease whose answer was lost. The relay ends the worker's sessions and gives back
        what the ledger does not name.
        """
        self._is_left_to_relay = True

    def close(self) -> None:
        """Ends the ledger: the file goes, unless the relay has something to settle."""
        if len(self._free) == self._slots and not self._is_left_to_relay:
            self.path.unlink(missing_ok=True)
        self._map.close()

    def _write(self, at: int, part: bytes, begun: int = 0) -> None:
        self._map[at : at + len(part) + 4] = part + CHECKSUM.pack(crc32(part, begun))


def _create(path: Path, header: bytes, slots: int) -> mmap.mmap:
    # Locked before it gets its name, so that the relay never sees a living worker's ledger without its lock. The
    # descriptor stays open, and with it the lock, until the process ends.
    unfinished = path.with_suffix(".new")
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    whole = header.ljust(INODE_AT, b"\0") + INODE.pack(os.fstat(descriptor).st_ino)
    # Written out, not only sized: a full filesystem says so now, as an error, and not later, as SIGBUS.
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(whole.ljust(HEADER_BYTES, b"\0") + bytes(slots * SLOT_BYTES))
    except OSError:
        unfinished.unlink(missing_ok=True)  # or the next try would find even less room
        raise
    unfinished.rename(path)
    return mmap.mmap(descriptor, file_octets(slots))
