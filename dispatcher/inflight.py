"""The in-flight ledger: what of a worker was physically on the wire, readable after the worker's death.

Each worker owns one small memory-mapped file in the run directory. Before the first byte that could cause acceptance
leaves, a slot says *on the wire*; when the answer arrives it says *answered*, with the answer; once that is recorded in
the database the slot is empty again. Two writes cost some microseconds, and outlive the process (not the host).

    empty ──leaving──▶ on the wire ──answer──▶ answered ──clear──▶ empty
      ▲                     │                                        │
      └──── torn write ─────┘ (a slot's state byte is written after its part, and each part has a checksum:
                               a torn *on the wire* has not left yet, a torn *answered* is still on the wire)

A ledger whose file lock is free belongs to a dead worker. The relay settles it: answered → recorded as answered, on
the wire → uncertain, by policy; every other lease of that worker → released, because nothing of it left. A ledger of
before the host's last start proves nothing of what it does not name: what was written last may never have reached the
disk. Those leases are left to the rescue.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID
from zlib import crc32

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.status import OnUncertain
from dispatcher.errors import DispatcherError

SUFFIX: Final = ".ledger"
FORMAT: Final = 1

_MAGIC: Final = b"EDLEDGER"
# magic, format, octets per slot, slots, worker, slot's name, boot id, checksum
_HEADER: Final = struct.Struct("<8sHHI64s64s36sI")
_HEADER_BYTES: Final = 256
_SLOT_BYTES: Final = 512

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


@dataclass(frozen=True, slots=True)
class Flight:
    """One attempt that left, as a ledger knows it.

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
class DeadLedger:
    """What a dead worker left.

    Attributes:
        worker: Its identity, as it stands in `email_log.locked_by`.
        slot: Its slot's name, as it stands in `email_hourly.slot`.
        flights: What had left and was not recorded.
        names_all: Whether nothing but these flights can have left; not so once the host went down.
    """

    path: Path
    worker: str
    slot: str
    flights: tuple[Flight, ...]
    names_all: bool


class Ledger:
    """A living worker's ledger. Not safe for use from several threads."""

    def __init__(self, folder: Path, *, worker: str, slot: str, slots: int, boot: str | None = None) -> None:
        """Creates the file and locks it until this process ends.

        Args:
            folder: The run directory; made if it is missing.
            slots: How many attempts may be in flight at once.
            boot: Which start of the host it belongs to; None for this one.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"{worker.replace('/', '_')}{SUFFIX}"
        self._slots = slots
        self._free = deque(range(slots))
        self._map = _create(self.path, _header(worker, slot, slots, boot_id() if boot is None else boot), slots)

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
        self._write(at + _ANSWER_AT, _pack_answer(outcome, finished_at))
        self._map[at] = _ANSWERED

    def clear(self, slot: int) -> None:
        """The answer is recorded in the database: the slot is free."""
        self._map[_HEADER_BYTES + slot * _SLOT_BYTES] = _EMPTY
        self._free.append(slot)

    def close(self) -> None:
        """Ends the ledger: the file goes, unless there is something in it that is left to the relay."""
        if len(self._free) == self._slots:
            self.path.unlink(missing_ok=True)
        self._map.close()

    def _write(self, at: int, part: bytes) -> None:
        self._map[at : at + len(part) + 4] = part + _CHECKSUM.pack(crc32(part))


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
    # Written out, not only sized: a full filesystem says so now, as an error, and not later, as SIGBUS.
    with open(descriptor, "wb", closefd=False) as file:
        file.write(header.ljust(_HEADER_BYTES, b"\0") + bytes(slots * _SLOT_BYTES))
    unfinished.rename(path)
    return mmap.mmap(descriptor, _HEADER_BYTES + slots * _SLOT_BYTES)


def _header(worker: str, slot: str, slots: int, boot: str) -> bytes:
    fields = (_MAGIC, FORMAT, _SLOT_BYTES, slots, worker.encode(), slot.encode(), boot.encode())
    return _HEADER.pack(*fields, crc32(repr(fields).encode()))


def _pack_answer(outcome: Outcome, finished_at: float) -> bytes:
    reason = "" if isinstance(outcome, Accepted) else outcome.reason.value
    code = "" if isinstance(outcome, Accepted) else outcome.code or ""
    message_id = outcome.provider_message_id or "" if isinstance(outcome, Accepted) else ""
    retry_after = outcome.retry_after if isinstance(outcome, Deferred) else None
    return _ANSWER.pack(
        finished_at,
        _OUTCOMES.index(type(outcome)),
        math.nan if retry_after is None else retry_after,
        reason.encode(),
        _fitting(code, 32),
        _fitting(message_id, 128),
        _fitting(outcome.detail or "", 160),
    )


def _fitting(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size]


@contextmanager
def dead_ledger(path: Path) -> Iterator[DeadLedger | None]:
    """The ledger of a dead worker, locked against a second settler; None if its worker lives or the file is gone.

    Raises:
        LedgerUnreadable: the file is foreign, newer than this release, truncated, or cannot be read at all.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise LedgerUnreadable(f"it cannot be opened: {error.strerror}") from error
    try:
        yield _read(path, _content(descriptor)) if _lock(descriptor) else None
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _content(descriptor: int) -> bytes:
    try:
        return Path(f"/proc/self/fd/{descriptor}").read_bytes()
    except OSError as error:
        raise LedgerUnreadable(f"it cannot be read: {error.strerror}") from error


def _read(path: Path, content: bytes) -> DeadLedger:
    if len(content) < _HEADER_BYTES or not content.startswith(_MAGIC):
        raise LedgerUnreadable("it is not an in-flight ledger")
    magic, version, slot_bytes, slots, worker, slot, boot, checksum = _HEADER.unpack_from(content)
    if version != FORMAT or slot_bytes != _SLOT_BYTES:
        raise LedgerUnreadable(f"its format {version} is not the one that this release reads ({FORMAT})")
    names = (worker.rstrip(b"\0"), slot.rstrip(b"\0"), boot.rstrip(b"\0"))
    if checksum != crc32(repr((magic, version, slot_bytes, slots, *names)).encode()):
        raise LedgerUnreadable("its header is damaged")
    end = _HEADER_BYTES + slots * _SLOT_BYTES
    if len(content) < end:
        raise LedgerUnreadable("it is truncated")
    try:
        found = [_flight(content[at : at + _SLOT_BYTES]) for at in range(_HEADER_BYTES, end, _SLOT_BYTES)]
    except (ValueError, IndexError) as error:
        raise LedgerUnreadable("it holds a word that this release does not know") from error
    worker_name, slot_name, boot_name = (name.decode() for name in names)
    return DeadLedger(
        path=path,
        worker=worker_name,
        slot=slot_name,
        flights=tuple(flight for flight in found if flight),
        names_all=boot_name != "" and boot_name == boot_id(),
    )


def _flight(slot: bytes) -> Flight | None:
    wire = _part(slot, _WIRE_AT, _WIRE)
    if slot[0] == _EMPTY or wire is None:
        return None
    email_id, token, number, started_at, policy, provider = _WIRE.unpack(wire)
    answer = _part(slot, _ANSWER_AT, _ANSWER) if slot[0] == _ANSWERED else None
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


def _part(slot: bytes, at: int, layout: struct.Struct) -> bytes | None:
    part = slot[at : at + layout.size]
    (checksum,) = _CHECKSUM.unpack_from(slot, at + layout.size)
    return part if crc32(part) == checksum else None


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
