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
import math
import mmap
import os
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID
from zlib import crc32

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import DispatcherError

SUFFIX: Final = ".ledger"
FORMAT: Final = 4

_MAGIC: Final = b"EDLEDGER"
# magic, format, octets per slot, slots, worker, slot's name, boot id, checksum
_HEADER: Final = struct.Struct("<8sHHI64s64s36sI")
_HEADER_BYTES: Final = 512
_SLOT_BYTES: Final = 512
# the number of the file itself: a copy tells of a moment that is over, and has no lock
_INODE: Final = struct.Struct("<Q")
_INODE_AT: Final = 184
# when the relay last voided leases, by `steady_clock`
_VOIDED: Final = struct.Struct("<d")
_VOIDED_AT: Final = 192
# email id, lease token; zeros where nothing is being rendered
_RENDERING: Final = struct.Struct("<16sq")
_RENDERING_AT: Final = 200
_RENDERINGS: Final = 12
_NOT_RENDERING: Final = bytes(_RENDERING.size)
# the database's identity, and a checksum; not there before the first lease
_DATABASE: Final = struct.Struct("<16s")
_DATABASE_AT: Final = _RENDERING_AT + _RENDERINGS * _RENDERING.size

# more than any ledger has; what lies there may be somebody's database dump
_MOST_BYTES: Final = 64 * 1024 * 1024

_EMPTY: Final = 0
_ON_THE_WIRE: Final = 1
_ANSWERED: Final = 2

# email id, lease token, attempt number, started at (unix seconds), policy, provider
_WIRE: Final = struct.Struct("<16sqidB24s")
_WIRE_AT: Final = 8
# finished at (unix seconds), outcome, retry after (seconds; NaN for none), reason, provider's code, provider's message
# id, detail
_ANSWER: Final = struct.Struct("<dBd32s32s128s160s")
_ANSWER_AT: Final = 96
_CHECKSUM: Final = struct.Struct("<I")

_OUTCOMES: Final[tuple[type[Outcome], ...]] = (Accepted, Deferred, Rejected, Uncertain)
_POLICIES: Final = tuple(OnUncertain)


class LedgerUnreadable(DispatcherError):
    """A file in the run directory is not a ledger that this release can read; it is to be kept."""


class Flight(NamedTuple):
    """One attempt that left, as a ledger knows it. A tuple: there are thousands a second.

    Attributes:
        started_at: Unix seconds.
        policy: What to do if the outcome stays unknown.
        finished_at: Unix seconds; None while it is on the wire.
        outcome: The provider's answer; None while it is on the wire.
    """

    email_id: UUID
    lease_token: int
    attempt_number: int
    provider: str
    started_at: float
    policy: OnUncertain
    finished_at: float | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """An email that was being rendered when its worker died, and may be why."""

    email_id: UUID
    lease_token: int


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
                os.pwrite(descriptor, _VOIDED.pack(at), _VOIDED_AT)
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
        self._renderings = deque(range(_RENDERINGS))
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._map = _create(self.path, _header(worker, slot, slots, boot_id() if boot is None else boot), slots)
            self._found = self.path.stat()
        except OSError as error:
            raise DispatcherError(
                f"The in-flight ledger cannot be made in the run directory: {error.strerror}.",
                remedy="Make room on its disk, let this user write there, or set DISPATCHER_RUN_DIR to another folder.",
            ) from error
        self.is_named = False

    @staticmethod
    def octets(slots: int) -> int:
        """The size of a ledger's file with so many slots."""
        return _HEADER_BYTES + slots * _SLOT_BYTES

    def name_database(self, database_id: UUID) -> None:
        """Writes down which database the leases are in; to be called before the first one."""
        self._write(_DATABASE_AT, database_id.bytes)
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
        at = _HEADER_BYTES + slot * _SLOT_BYTES
        part = _WIRE.pack(
            email_id.bytes, lease_token, attempt_number, started_at, _POLICIES.index(policy), provider.encode()[:24]
        )
        self._write(at + _WIRE_AT, part)
        self._map[at] = _ON_THE_WIRE
        return slot

    def answered(self, slot: int, outcome: Outcome, *, finished_at: float) -> None:
        """Writes down the answer of the attempt in that slot."""
        at = _HEADER_BYTES + slot * _SLOT_BYTES
        # Its checksum goes on from the flight's: the relay may read while a slot passes from one email to the next, and
        # must not take one's answer for the other's.
        (flight,) = _CHECKSUM.unpack_from(self._map, at + _WIRE_AT + _WIRE.size)
        self._write(at + _ANSWER_AT, _pack_answer(outcome, finished_at), begun=flight)
        self._map[at] = _ANSWERED

    def clear(self, slot: int) -> None:
        """The answer is recorded in the database: the slot is free."""
        self._map[_HEADER_BYTES + slot * _SLOT_BYTES] = _EMPTY
        self._free.append(slot)

    @property
    def voided_at(self) -> float:
        """When the relay last voided leases, by `steady_clock`: look after `leaving`, and before the first byte."""
        return float(_VOIDED.unpack_from(self._map, _VOIDED_AT)[0])

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
        _RENDERING.pack_into(self._map, _RENDERING_AT + place * _RENDERING.size, email_id.bytes, lease_token)
        return place

    def end_rendering(self, place: int | None) -> None:
        """Takes back what `begin_rendering` wrote."""
        if place is not None:
            at = _RENDERING_AT + place * _RENDERING.size
            self._map[at : at + _RENDERING.size] = _NOT_RENDERING
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
        self._map[at : at + len(part) + 4] = part + _CHECKSUM.pack(crc32(part, begun))


def steady_clock() -> float:
    """Seconds that go on while the host sleeps, so that a lease never looks younger than it is.

    The same for all processes of the host.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The kernel's name for the host's last start; empty where it tells none, and then no ledger proves anything."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _create(path: Path, header: bytes, slots: int) -> mmap.mmap:
    # Locked before it gets its name, so that the relay never sees a living worker's ledger without its lock. The
    # descriptor stays open, and with it the lock, until the process ends.
    unfinished = path.with_suffix(".new")
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    whole = header.ljust(_INODE_AT, b"\0") + _INODE.pack(os.fstat(descriptor).st_ino)
    # Written out, not only sized: a full filesystem says so now, as an error, and not later, as SIGBUS.
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(whole.ljust(_HEADER_BYTES, b"\0") + bytes(slots * _SLOT_BYTES))
    except OSError:
        unfinished.unlink(missing_ok=True)  # or the next try would find even less room
        raise
    unfinished.rename(path)
    return mmap.mmap(descriptor, Ledger.octets(slots))


def _header(worker: str, slot: str, slots: int, boot: str) -> bytes:
    fields = (_MAGIC, FORMAT, _SLOT_BYTES, slots, worker.encode(), slot.encode(), boot.encode())
    return _HEADER.pack(*fields, crc32(repr(fields).encode()))


def _pack_answer(outcome: Outcome, finished_at: float) -> bytes:
    kind = _OUTCOMES.index(type(outcome))
    detail = _fitting(outcome.detail or "", 160)
    if isinstance(outcome, Accepted):
        message_id = _fitting(outcome.provider_message_id or "", 128)
        return _ANSWER.pack(finished_at, kind, math.nan, b"", b"", message_id, detail)
    retry_after = outcome.retry_after if isinstance(outcome, Deferred) else None
    return _ANSWER.pack(
        finished_at,
        kind,
        math.nan if retry_after is None else retry_after,
        outcome.reason.value.encode(),
        _fitting(outcome.code or "", 32),
        b"",
        detail,
    )


def _fitting(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size]


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
        head = None if descriptor is None else _head(_content(descriptor, _HEADER_BYTES))
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


def _content(descriptor: int, most_bytes: int = _MOST_BYTES) -> bytes:
    """What stands in the file, unless it is a ledger's copy, whose worker may live and work on."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise LedgerUnreadable("it cannot be read: it is not a file")
    try:
        content = os.pread(descriptor, min(found.st_size, most_bytes), 0)
    except OSError as error:
        raise LedgerUnreadable(f"it cannot be read: {error.strerror}") from error
    head = _head(content)
    if _INODE.unpack_from(content, _INODE_AT)[0] != found.st_ino:
        raise LedgerUnreadable(f"it is a copy of the ledger of {head.worker}")
    return content


@dataclass(frozen=True, slots=True)
class _Head:
    worker: str
    slot: str
    boot: str
    slots: int
    database_id: UUID | None


def _head(content: bytes) -> _Head:
    if len(content) < _HEADER_BYTES or not content.startswith(_MAGIC):
        raise LedgerUnreadable("it is not an in-flight ledger")
    magic, version, slot_bytes, slots, worker, slot, boot, checksum = _HEADER.unpack_from(content)
    if version != FORMAT or slot_bytes != _SLOT_BYTES:
        raise LedgerUnreadable(f"its format {version} is not the one that this release reads ({FORMAT})")
    names = (worker.rstrip(b"\0"), slot.rstrip(b"\0"), boot.rstrip(b"\0"))
    if checksum != crc32(repr((magic, version, slot_bytes, slots, *names)).encode()):
        raise LedgerUnreadable("its header is damaged")
    worker_name, slot_name, boot_name = (name.decode() for name in names)
    database = _part(content, _DATABASE_AT, _DATABASE)
    return _Head(worker_name, slot_name, boot_name, slots, None if database is None else UUID(bytes=database))


def _read(path: Path, content: bytes) -> DeadLedger:
    head = _head(content)
    end = Ledger.octets(head.slots)
    if len(content) < end:
        raise LedgerUnreadable("it is truncated")
    try:
        found = [_flight(content[at : at + _SLOT_BYTES]) for at in range(_HEADER_BYTES, end, _SLOT_BYTES)]
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
        suspects=tuple(_suspects(content)),
        names_all=head.boot != "" and head.boot == boot_id(),
    )


def _suspects(content: bytes) -> Iterator[Suspect]:
    for place in range(_RENDERINGS):
        email_id, token = _RENDERING.unpack_from(content, _RENDERING_AT + place * _RENDERING.size)
        if email_id != bytes(16):
            yield Suspect(UUID(bytes=email_id), token)


def _flight(slot: bytes) -> Flight | None:
    wire = _part(slot, _WIRE_AT, _WIRE)
    if slot[0] == _EMPTY or wire is None:
        return None
    email_id, token, number, started_at, policy, provider = _WIRE.unpack(wire)
    answer = _part(slot, _ANSWER_AT, _ANSWER, begun=crc32(wire)) if slot[0] == _ANSWERED else None
    finished_at, outcome = _unpack_answer(answer) if answer else (None, None)
    return Flight(
        email_id=UUID(bytes=email_id),
        lease_token=token,
        attempt_number=number,
        provider=_text(provider) or "",
        started_at=started_at,
        policy=_POLICIES[policy],
        finished_at=finished_at,
        outcome=outcome,
    )


def _part(slot: bytes, at: int, layout: struct.Struct, begun: int = 0) -> bytes | None:
    part = slot[at : at + layout.size]
    (checksum,) = _CHECKSUM.unpack_from(slot, at + layout.size)
    return part if crc32(part, begun) == checksum else None


def _unpack_answer(part: bytes) -> tuple[float, Outcome]:
    finished_at, kind, retry_after, reason, code, message_id, detail = _ANSWER.unpack(part)
    match _OUTCOMES[kind].__name__:
        case "Accepted":
            return finished_at, Accepted(_text(message_id), _text(detail))
        case "Deferred":
            wait = None if math.isnan(retry_after) else retry_after
            return finished_at, Deferred(Reason(_text(reason) or ""), _text(detail), _text(code), wait)
        case "Rejected":
            return finished_at, Rejected(Reason(_text(reason) or ""), _text(detail), _text(code))
        case _:
            return finished_at, Uncertain(_text(detail), _text(code))


def _text(field: bytes) -> str | None:
    return field.rstrip(b"\0").decode("utf-8", "ignore") or None
