"""Reads the ledgers of dead and live workers, for the relay. See `ledger`."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from uuid import UUID

from dispatcher.domain.values import dataclass
from dispatcher.host.clock import boot_id
from dispatcher.host.ledger_format import (
    HEADER_BYTES,
    INODE,
    INODE_AT,
    SLOT_BYTES,
    VOIDED,
    VOIDED_AT,
    InFlightAttempt,
    LedgerUnreadable,
    RenderSuspect,
    file_octets,
    read_head,
    read_slot,
    read_suspects,
)

MAX_BYTES: Final = 64 * 1024 * 1024
"""No ledger is larger than this. A larger file is not read into memory: it may be a database dump."""


@dataclass(frozen=True, slots=True)
class DeadLedger:
    """The ledger of a dead worker. `database_id` is None if the worker never leased an email, or in the previous
    format.

    `attempts` were on the wire or answered, and are not yet recorded; `suspects` were being rendered. After the host
    has rebooted, the ledger's last writes may be lost: it is not `is_complete`.
    """

    path: Path
    worker: str
    slot: str
    database_id: UUID | None
    attempts: tuple[InFlightAttempt, ...]
    suspects: tuple[RenderSuspect, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class LivingLedger:
    """The ledger of a live worker, which may write to it while the relay reads. `database_id` is None before the first
    lease, or in the previous format."""

    path: Path
    worker: str
    slot: str
    database_id: UUID | None

    def void_leases(self, at: float) -> None:
        """Voids every lease that was last confirmed (leased or renewed) before `at` (`steady_clock`): the worker then
        begins no attempt under these leases.

        The worker sees this change after a moment, not immediately. Wait before you call `attempts`. Raises
        LedgerUnreadable.
        """
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, VOIDED.pack(at), VOIDED_AT)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LedgerUnreadable(f"the file cannot be written: {error.strerror}") from error

    def attempts(self) -> tuple[InFlightAttempt, ...]:
        """Reads the attempts that are on the wire or answered.

        An attempt that begins during the call may be missing in the result. This cannot happen for a voided lease,
        because the worker begins no attempt under it. Raises LedgerUnreadable.
        """
        with _opened(self.path) as descriptor:
            if descriptor is None:
                raise LedgerUnreadable("the file was deleted")
            return _read(self.path, _content(descriptor)).attempts


@contextmanager
def dead_ledger(path: Path) -> Iterator[DeadLedger | None]:
    """Locks and reads the ledger of a dead worker; None if the worker is alive or the file was deleted. Raises
    LedgerUnreadable."""
    with _opened(path) as descriptor:
        yield None if descriptor is None or not _lock(descriptor) else _read(path, _content(descriptor))


def living_ledger(path: Path) -> LivingLedger | None:
    """Reads the header of a ledger, whose worker may be dead; None if the file was deleted. Raises LedgerUnreadable."""
    with _opened(path) as descriptor:
        head = None if descriptor is None else read_head(_content(descriptor, HEADER_BYTES))
    return None if head is None else LivingLedger(path, head.worker, head.slot, head.database_id)


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Opens a file for reading; None if the file was deleted. Never blocks, even if the path is a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise LedgerUnreadable(f"the file cannot be opened: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LedgerUnreadable(f"the file cannot be locked: {error.strerror}") from error
    return True


def _content(descriptor: int, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a ledger file. Refuses a copy of a ledger, because the worker may still be using the original."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise LedgerUnreadable("the file cannot be read: it is not a regular file")
    try:
        content = os.pread(descriptor, min(found.st_size, max_bytes), 0)
    except OSError as error:
        raise LedgerUnreadable(f"the file cannot be read: {error.strerror}") from error
    head = read_head(content)
    if INODE.unpack_from(content, INODE_AT)[0] != found.st_ino:
        raise LedgerUnreadable(f"the file is a copy of the ledger of {head.worker}")
    return content


def _read(path: Path, content: bytes) -> DeadLedger:
    head = read_head(content)
    end = file_octets(head.slots)
    if len(content) < end:
        raise LedgerUnreadable("the file is truncated")
    try:
        found = [read_slot(content[at : at + SLOT_BYTES]) for at in range(HEADER_BYTES, end, SLOT_BYTES)]
    except (ValueError, IndexError) as error:
        raise LedgerUnreadable("the file contains a value that this release does not know") from error
    attempts = tuple(attempt for attempt in found if attempt)
    if attempts and head.has_database and head.database_id is None:
        raise LedgerUnreadable("the file does not say to which database its emails belong")
    return DeadLedger(
        path=path,
        worker=head.worker,
        slot=head.slot,
        database_id=head.database_id,
        attempts=attempts,
        suspects=tuple(read_suspects(content)),
        is_complete=head.boot != "" and head.boot == boot_id(),
    )
