"""Ledgers as the relay reads them: those of dead workers, and of living ones from outside. See `ledger`."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from dispatcher.host.clock import boot_id
from dispatcher.host.ledger_format import (
    HEADER_BYTES,
    INODE,
    INODE_AT,
    SLOT_BYTES,
    VOIDED,
    VOIDED_AT,
    Flight,
    LedgerUnreadable,
    Suspect,
    file_octets,
    read_head,
    read_slot,
    read_suspects,
)

MOST_BYTES: Final = 64 * 1024 * 1024
"""More than any ledger has. What lies there may be somebody's database dump."""


@dataclass(frozen=True, slots=True)
class DeadLedger:
    """What a dead worker left.

    Attributes:
        worker: Its identity, as it stands in `email_log.locked_by`.
        slot: Its slot's name, as it stands in `email_hourly.slot`.
        flights: What had left and was not recorded.
        suspects: What was being rendered.
        names_all: Whether nothing but these flights can have left; not so once the host went down.
        database_id: Where its leases are; None if it never had one.
    """

    path: Path
    worker: str
    slot: str
    database_id: UUID | None
    flights: tuple[Flight, ...]
    suspects: tuple[Suspect, ...]
    names_all: bool


@dataclass(frozen=True, slots=True)
class LivingLedger:
    """A worker that lives, as the relay of its host sees it: from outside, while the worker writes.

    Attributes:
        worker: Its identity, as it stands in `email_log.locked_by`.
        slot: Its slot's name.
        database_id: Where its leases are; None before the first.
    """

    path: Path
    worker: str
    slot: str
    database_id: UUID | None

    def void_leases(self, at: float) -> None:
        """From now on nothing leaves under a lease that was last confirmed by then; it takes a moment to be seen.

        Args:
            at: Now, by `steady_clock`.

        Raises:
            LedgerUnreadable: it cannot be written.
        """
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, VOIDED.pack(at), VOIDED_AT)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LedgerUnreadable(f"it cannot be written: {error.strerror}") from error

    def flights(self) -> tuple[Flight, ...]:
        """What is on the wire or answered. What leaves while this reads may be missing, unless it was voided before.

        Raises:
            LedgerUnreadable: it cannot be read any more.
        """
        with _opened(self.path) as descriptor:
            if descriptor is None:
                raise LedgerUnreadable("it is gone")
            return _read(self.path, _content(descriptor)).flights


@contextmanager
def dead_ledger(path: Path) -> Iterator[DeadLedger | None]:
    """The ledger of a dead worker, locked against a second settler; None if its worker lives or the file is gone.

    Raises:
        LedgerUnreadable: the file is foreign, newer than this release, truncated, or cannot be read at all.
    """
    with _opened(path) as descriptor:
        yield None if descriptor is None or not _lock(descriptor) else _read(path, _content(descriptor))


def living_ledger(path: Path) -> LivingLedger | None:
    """The ledger of a worker that lives; None if the file is gone. Whether it lives is for the caller to know.

    Raises:
        LedgerUnreadable: see `dead_ledger`.
    """
    with _opened(path) as descriptor:
        head = None if descriptor is None else read_head(_content(descriptor, HEADER_BYTES))
    return None if head is None else LivingLedger(path, head.worker, head.slot, head.database_id)


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A descriptor to read a file with; None if it is gone. Does not wait, whatever lies there instead of a file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise LedgerUnreadable(f"it cannot be opened: {error.strerror}") from error
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
        raise LedgerUnreadable(f"it cannot be locked: {error.strerror}") from error
    return True


def _content(descriptor: int, most_bytes: int = MOST_BYTES) -> bytes:
    """What stands in the file, unless it is a ledger's copy, whose worker may live and work on."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise LedgerUnreadable("it cannot be read: it is not a file")
    try:
        content = os.pread(descriptor, min(found.st_size, most_bytes), 0)
    except OSError as error:
        raise LedgerUnreadable(f"it cannot be read: {error.strerror}") from error
    head = read_head(content)
    if INODE.unpack_from(content, INODE_AT)[0] != found.st_ino:
        raise LedgerUnreadable(f"it is a copy of the ledger of {head.worker}")
    return content


def _read(path: Path, content: bytes) -> DeadLedger:
    head = read_head(content)
    end = file_octets(head.slots)
    if len(content) < end:
        raise LedgerUnreadable("it is truncated")
    try:
        found = [read_slot(content[at : at + SLOT_BYTES]) for at in range(HEADER_BYTES, end, SLOT_BYTES)]
    except (ValueError, IndexError) as error:
        raise LedgerUnreadable("it holds a word that this release does not know") from error
    flights = tuple(flight for flight in found if flight)
    if flights and head.database_id is None:
        raise LedgerUnreadable("it does not name the database of its emails")
    return DeadLedger(
        path=path,
        worker=head.worker,
        slot=head.slot,
        database_id=head.database_id,
        flights=flights,
        suspects=tuple(read_suspects(content)),
        names_all=head.boot != "" and head.boot == boot_id(),
    )
