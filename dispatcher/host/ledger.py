"""The in-flight ledger: which emails of a worker were on the wire, readable after the worker has died.

Each worker owns one small memory-mapped file in the run directory. Before it sends the first byte that could cause
acceptance, the worker marks a slot *on the wire*. When the answer arrives, the worker stores the answer and marks the
slot *answered*. When the result is recorded in the database, the worker clears the slot. Each write costs a few
microseconds. The file survives the process, but not the host.

    empty ──mark_on_wire──▶ on the wire ──mark_answered──▶ answered ──clear──▶ empty
      ▲                          │
      └─────── torn write ───────┘ (The state byte is written last, and each part has a checksum. A torn *on the wire*
                                    means not sent; a torn *answered* means still on the wire.)

An unlocked ledger belongs to a dead worker. The relay ends the worker's leases: it records the answers of *answered*
slots, applies DISPATCHER_ON_UNCERTAIN to *on the wire* slots, and releases all other leases, because their emails were
not sent. A ledger from before the host's last boot may lack the worker's last writes. So an email that is missing from
this ledger may still have been sent, and `recovery.lost_host` recovers its lease. A ledger also contains the id of its
database. If the host's settings later point to a different database, the relay neither processes nor deletes the
ledger.

A locked ledger belongs to a live worker, which may be frozen (stopped, swapped out) while its leases expire. Before the
relay releases such a lease, it must be certain that the worker has not sent the email, and will not send it. Each side
writes before it reads, so correctness does not depend on a clock:

    worker   1 marks the slot *on the wire*   2 reads `voided_at`. If the lease was last confirmed (leased or renewed)
               before this time, the lease is void: the worker clears the slot and sends nothing
               3 sends the first byte
    relay    1 finds expired leases   2 writes `voided_at`   3 waits until the worker can read the new `voided_at`
               4 reads the slots   5 releases the leases that are in no slot, unless they were renewed since step 1

If the relay does not see the slot in its step 4, the worker's step 2 comes after the relay's step 2, and the worker
finds its lease void. If the worker was frozen after its step 2, the relay sees the slot. A worker that continues at any
other moment stops in its step 2, or fails the check of the lease token when it writes to PostgreSQL.

Rendering an email can crash the worker, in native code or because memory runs out. The ledger therefore also lists the
emails that are being rendered.
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
    """A worker's own ledger. Only `begin_rendering` and `end_rendering` are thread-safe."""

    def __init__(self, folder: Path, *, worker: str, slot: str, slots: int, boot: str | None = None) -> None:
        """Creates the file in the run directory, and locks it until this process exits.

        `slot` is the worker's host and slot number; `slots` limits the attempts in flight. Raises DispatcherError if
        the file cannot be created, for example on a full disk.
        """
        self.path = folder / f"{worker.replace('/', '_')}{SUFFIX}"
        self._slots = slots
        self._free = deque(range(slots))
        self._is_file_kept = False
        self._renderings = deque(range(RENDERINGS))
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._map = _create(self.path, pack_header(worker, slot, slots, boot_id() if boot is None else boot), slots)
            self._found = self.path.stat()
        except OSError as error:
            raise DispatcherError(
                f"The in-flight ledger cannot be created in the run directory: {error.strerror}.",
                remedy="Free disk space, let this user write there, or set DISPATCHER_RUN_DIR to another directory.",
            ) from error
        self.has_database = False

    def set_database(self, database_id: UUID) -> None:
        """Writes the id of the database in which the worker leases emails. Call this before the first lease."""
        self._write(DATABASE_AT, database_id.bytes)
        self.has_database = True

    def mark_on_wire(
        self,
        email_id: UUID,
        lease_token: int,
        attempt_number: int,
        *,
        provider: str,
        started_at: float,
        policy: OnUncertain,
    ) -> int:
        """Marks an attempt as on the wire, and returns its slot. If the worker dies before the answer, the relay
        follows `policy`.

        Raises IndexError if all slots are in use: the email must not be sent.
        """
        slot = self._free.popleft()
        at = HEADER_BYTES + slot * SLOT_BYTES
        part = WIRE.pack(
            email_id.bytes, lease_token, attempt_number, started_at, POLICIES.index(policy), provider.encode()[:24]
        )
        self._write(at + WIRE_AT, part)
        self._map[at] = ON_THE_WIRE
        return slot

    def mark_answered(self, slot: int, outcome: Outcome, *, finished_at: float) -> None:
        """Stores the answer to the attempt in this slot."""
        at = HEADER_BYTES + slot * SLOT_BYTES
        # The relay may read a slot while the worker reuses the slot for the next email. The answer's checksum includes
        # the attempt's checksum, so that the relay never combines one email's answer with another email's attempt.
        (wire_checksum,) = CHECKSUM.unpack_from(self._map, at + WIRE_AT + WIRE.size)
        self._write(at + ANSWER_AT, pack_answer(outcome, finished_at), begun=wire_checksum)
        self._map[at] = ANSWERED

    def clear(self, slot: int) -> None:
        """Frees the slot. Call this after the result is recorded in the database, or if the email was not sent."""
        self._map[HEADER_BYTES + slot * SLOT_BYTES] = EMPTY
        self._free.append(slot)

    @property
    def voided_at(self) -> float:
        """When the relay last voided leases (`steady_clock`).

        Read this after `mark_on_wire`, and before the first byte is sent. A lease that was last confirmed (leased or
        renewed) before this time is void: do not send its email.
        """
        return float(VOIDED.unpack_from(self._map, VOIDED_AT)[0])

    @property
    def is_in_place(self) -> bool:
        """Whether the file still exists at its path, so that the relay can find it."""
        try:
            return os.path.samestat(self.path.stat(), self._found)
        except OSError:
            return False

    def begin_rendering(self, email_id: UUID, lease_token: int) -> int | None:
        """Notes that this email is being rendered, in case the process dies before `end_rendering`. Returns the
        argument for `end_rendering`; None if `RENDERINGS` emails are being rendered already."""
        try:
            index = self._renderings.pop()
        except IndexError:
            return None
        RENDERING.pack_into(self._map, RENDERING_AT + index * RENDERING.size, email_id.bytes, lease_token)
        return index

    def end_rendering(self, index: int | None) -> None:
        if index is not None:
            at = RENDERING_AT + index * RENDERING.size
            self._map[at : at + RENDERING.size] = NOT_RENDERING
            self._renderings.append(index)

    def keep_file(self) -> None:
        """Keeps the file when the worker exits, so that the relay ends the worker's leases.

        Call this if PostgreSQL's reply to a statement that leases emails was lost. PostgreSQL may have committed these
        leases, or may still commit them, although the worker does not know them. The relay ends the worker's database
        sessions, and then releases the leases that are not in the ledger.
        """
        self._is_file_kept = True

    def close(self) -> None:
        """Deletes the file, unless the relay still needs it to end the worker's leases."""
        if len(self._free) == self._slots and not self._is_file_kept:
            self.path.unlink(missing_ok=True)
        self._map.close()

    def _write(self, at: int, part: bytes, begun: int = 0) -> None:
        self._map[at : at + len(part) + 4] = part + CHECKSUM.pack(crc32(part, begun))


def _create(path: Path, header: bytes, slots: int) -> mmap.mmap:
    # Lock the file before it is renamed to its final name, so that the relay never sees the unlocked ledger of a live
    # worker. The descriptor stays open until the process exits, and so the file stays locked.
    unfinished = path.with_suffix(".new")
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    whole = header.ljust(INODE_AT, b"\0") + INODE.pack(os.fstat(descriptor).st_ino)
    # Write the whole file, so that a full filesystem causes an error here. If only the size were set, a later write
    # could end the process with SIGBUS.
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(whole.ljust(HEADER_BYTES, b"\0") + bytes(slots * SLOT_BYTES))
    except OSError:
        unfinished.unlink(missing_ok=True)  # free the disk space for the next try
        raise
    unfinished.rename(path)
    return mmap.mmap(descriptor, file_octets(slots))
