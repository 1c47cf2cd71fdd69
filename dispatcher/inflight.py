"""The in-flight ledger: what of a worker was physically on the wire, readable after the worker's death.

Each worker owns one small memory-mapped file in the run directory. Before the first byte that could cause acceptance
leaves, a slot says *on the wire*; when the answer arrives it says *answered*, with the answer; once that is recorded in
the database the slot is empty again. Two writes cost some microseconds, and outlive the process (not the host).

    empty ──leaving──▶ on the wire ──answer──▶ answered ──clear──▶ empty
      ▲                     │                                        │
      └──── torn write ─────┘ (a slot's state byte is written after its part, and each part has a checksum:
                               a torn *on the wire* has not left yet, a torn *answered* is still on the wire)

A ledger whose file lock is free belongs to a dead worker. The relay settles it: answered → recorded as answered, on
the wire → uncertain, by policy; every other lease of that worker → released, because nothing of it left.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
_HEADER: Final = struct.Struct("<8sHHI64s64sI")
_HEADER_BYTES: Final = 256
_SLOT_BYTES: Final = 512

_EMPTY: Final = 0
_ON_THE_WIRE: Final = 1
_ANSWERED: Final = 2

# email id, lease token, attempt number, started at (unix seconds), policy, provider
_WIRE: Final = struct.Struct("<16sqidB24s")
_WIRE_AT: Final = 8
# finished at (unix seconds), outcome, reason, provider's code, provider's message id, detail
_ANSWER: Final = struct.Struct("<dB32s32s128s160s")
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
    """

    path: Path
    worker: str
    slot: str
    flights: tuple[Flight, ...]


class Ledger:
    """A living worker's ledger. Not safe for use from several threads."""

    def __init__(self, folder: Path, *, worker: str, slot: str, slots: int) -> None:
        """Creates the file and locks it until this process ends.

        Args:
            folder: The run directory; made if it is missing.
            slots: How many attempts may be in flight at once.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"{worker.replace('/', '_')}{SUFFIX}"
        self._free = deque(range(slots))
        self._map = _create(self.path, worker, slot, slots)

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
        """Writes down that an attempt goes on the wire now; returns its slot."""
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
        """Ends the ledger of a worker that leaves nothing behind: the file goes."""
        self.path.unlink(missing_ok=True)
        self._map.close()

    def _write(self, at: int, part: bytes) -> None:
        self._map[at : at + len(part) + 4] = part + _CHECKSUM.pack(crc32(part))


def _create(path: Path, worker: str, slot: str, slots: int) -> mmap.mmap:
    # Locked before it gets its name, so that the relay never sees a living worker's ledger without its lock. The
    # descriptor stays open, and with it the lock, until the process ends.
    unfinished = path.with_suffix(".new")
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Written out, not only sized: a full filesystem says so now, as an error, and not later, as SIGBUS.
    with open(descriptor, "wb", closefd=False) as file:
        file.write(_header(worker, slot, slots).ljust(_HEADER_BYTES, b"\0") + bytes(slots * _SLOT_BYTES))
    unfinished.rename(path)
    return mmap.mmap(descriptor, _HEADER_BYTES + slots * _SLOT_BYTES)


def _header(worker: str, slot: str, slots: int) -> bytes:
    fields = (_MAGIC, FORMAT, _SLOT_BYTES, slots, worker.encode(), slot.encode())
    return _HEADER.pack(*fields, crc32(repr(fields).encode()))


def _pack_answer(outcome: Outcome, finished_at: float) -> bytes:
    reason = "" if isinstance(outcome, Accepted) else outcome.reason.value
    code = "" if isinstance(outcome, Accepted) else outcome.code or ""
    message_id = outcome.provider_message_id or "" if isinstance(outcome, Accepted) else ""
    return _ANSWER.pack(
        finished_at,
        _OUTCOMES.index(type(outcome)),
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
        LedgerUnreadable: the file is foreign, newer than this release, or truncated.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        locked = False
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield _read(path, Path(f"/proc/self/fd/{descriptor}").read_bytes()) if locked else None
    finally:
        os.close(descriptor)


def _read(path: Path, content: bytes) -> DeadLedger:
    if len(content) < _HEADER_BYTES or not content.startswith(_MAGIC):
        raise LedgerUnreadable("it is not an in-flight ledger")
    magic, version, slot_bytes, slots, worker, slot, checksum = _HEADER.unpack_from(content)
    if version != FORMAT or slot_bytes != _SLOT_BYTES:
        raise LedgerUnreadable(f"its format {version} is not the one that this release reads ({FORMAT})")
    names = (worker.rstrip(b"\0"), slot.rstrip(b"\0"))
    if checksum != crc32(repr((magic, version, slot_bytes, slots, *names)).encode()):
        raise LedgerUnreadable("its header is damaged")
    if len(content) < _HEADER_BYTES + slots * _SLOT_BYTES:
        raise LedgerUnreadable("it is truncated")
    found = (_flight(content[at : at + _SLOT_BYTES]) for at in range(_HEADER_BYTES, len(content), _SLOT_BYTES))
    return DeadLedger(path, names[0].decode(), names[1].decode(), tuple(flight for flight in found if flight))


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
    finished_at, kind, reason, code, message_id, detail = _ANSWER.unpack(part)
    match _OUTCOMES[kind].__name__:
        case "Accepted":
            return finished_at, Accepted(_text(message_id), _text(detail))
        case "Deferred":
            return finished_at, Deferred(Reason(_text(reason) or ""), _text(detail), _text(code))
        case "Rejected":
            return finished_at, Rejected(Reason(_text(reason) or ""), _text(detail), _text(code))
        case _:
            return finished_at, Uncertain(_text(detail), _text(code))


def _text(field: bytes) -> str | None:
    return field.rstrip(b"\0").decode("utf-8", "ignore") or None
