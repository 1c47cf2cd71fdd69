"""The binary format of a ledger file. See `ledger`."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple
from uuid import UUID
from zlib import crc32

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, PartialDelivery, Reason, Rejected, Uncertain
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.values import dataclass
from dispatcher.errors import DispatcherError

SUFFIX: Final = ".ledger"
FORMAT: Final = 4
WITHOUT_DATABASE: Final = 3
"""The previous format, which this release reads, too. Its only difference: it does not contain the database's id."""

MAGIC: Final = b"EDLEDGER"
# magic, format, octets per slot, number of slots, worker, the worker's host and slot number, boot id, checksum
HEADER: Final = struct.Struct("<8sHHI64s64s36sI")
HEADER_BYTES: Final = 512
SLOT_BYTES: Final = 512
# the file's inode number, by which a reader detects a copy of the file. A copy is outdated and not locked.
INODE: Final = struct.Struct("<Q")
INODE_AT: Final = 184
# `voided_at` (`steady_clock`): leases that were last confirmed before this time are void
VOIDED: Final = struct.Struct("<d")
VOIDED_AT: Final = 192
# email id, lease token; zeros if nothing is being rendered
RENDERING: Final = struct.Struct("<16sq")
RENDERING_AT: Final = 200
RENDERINGS: Final = 12
NOT_RENDERING: Final = bytes(RENDERING.size)
# the database's id; zeros before the first lease. A checksum follows.
DATABASE: Final = struct.Struct("<16s")
DATABASE_AT: Final = RENDERING_AT + RENDERINGS * RENDERING.size

EMPTY: Final = 0
ON_THE_WIRE: Final = 1
ANSWERED: Final = 2

# email id, lease token, attempt number, started at (unix seconds), policy, provider
WIRE: Final = struct.Struct("<16sqidB24s")
WIRE_AT: Final = 8
# finished at (unix seconds), outcome, retry after (seconds; NaN for none), reason, provider's code, provider's message
# id (of a deferral: the recipients who got the email, see `_pack_partial`), detail
ANSWER: Final = struct.Struct("<dBd32s32s128s160s")
PARTIAL_OCTETS: Final = 128
ANSWER_AT: Final = 96
CHECKSUM: Final = struct.Struct("<I")

OUTCOMES: Final[tuple[type[Outcome], ...]] = (Accepted, Deferred, Rejected, Uncertain)
POLICIES: Final = tuple(OnUncertain)


class LedgerUnreadable(DispatcherError):
    """A file in the run directory is not a ledger that this release can read.

    Do not delete the file: it may still show which emails were on the wire.
    """


class InFlightAttempt(NamedTuple):
    """One attempt in a ledger slot, times in Unix seconds. A tuple, for speed: thousands are created per second.

    While on the wire, `finished_at` and `outcome` are None. `policy`: what to do if the outcome stays unknown.
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
class RenderSuspect:
    """An email that was being rendered when its worker died, and that may have killed the worker."""

    email_id: UUID
    lease_token: int


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    worker: str
    slot: str
    boot: str
    slots: int
    database_id: UUID | None
    has_database: bool
    """Whether the format says to which database the emails belong."""


def read_head(content: bytes) -> LedgerHeader:
    if len(content) < HEADER_BYTES or not content.startswith(MAGIC):
        raise LedgerUnreadable("the file is not an in-flight ledger")
    magic, version, slot_bytes, slots, worker, slot, boot, checksum = HEADER.unpack_from(content)
    if version not in (FORMAT, WITHOUT_DATABASE) or slot_bytes != SLOT_BYTES:
        readable = f"{WITHOUT_DATABASE} and {FORMAT}"
        raise LedgerUnreadable(f"the file has format {version}, and this release reads only the formats {readable}")
    names = (worker.rstrip(b"\0"), slot.rstrip(b"\0"), boot.rstrip(b"\0"))
    if checksum != crc32(repr((magic, version, slot_bytes, slots, *names)).encode()):
        raise LedgerUnreadable("the file's header is damaged")
    worker_name, slot_name, boot_name = (name.decode() for name in names)
    database = _part(content, DATABASE_AT, DATABASE)
    database_id = None if database is None else UUID(bytes=database)
    return LedgerHeader(worker_name, slot_name, boot_name, slots, database_id, version != WITHOUT_DATABASE)


def file_octets(slots: int) -> int:
    return HEADER_BYTES + slots * SLOT_BYTES


def pack_header(worker: str, slot: str, slots: int, boot: str) -> bytes:
    fields = (MAGIC, FORMAT, SLOT_BYTES, slots, worker.encode(), slot.encode(), boot.encode())
    return HEADER.pack(*fields, crc32(repr(fields).encode()))


def pack_answer(outcome: Outcome, finished_at: float) -> bytes:
    kind = OUTCOMES.index(type(outcome))
    detail = _fitting(outcome.detail, 160) if outcome.detail else b""
    if isinstance(outcome, Accepted):
        message_id = _fitting(outcome.provider_message_id or "", 128)
        return ANSWER.pack(finished_at, kind, math.nan, b"", b"", message_id, detail)
    retry_after, partial = (outcome.retry_after, outcome.partial) if isinstance(outcome, Deferred) else (None, None)
    return ANSWER.pack(
        finished_at,
        kind,
        math.nan if retry_after is None else retry_after,
        outcome.reason.value.encode(),
        _fitting(outcome.code or "", 32),
        b"" if partial is None else _pack_partial(partial),
        detail,
    )


def _pack_partial(partial: PartialDelivery) -> bytes:
    """A bit for the position of each recipient who got the email; the bit of position 0 is `has_progress`.

    Leaves out the refused recipients: a recovered email is tried again for them, and they are refused again. All
    positions fit, because an email has at most 1,000 recipients (`email_rules.MAX_RECIPIENTS`).
    """
    bits = sum(1 << position for position, code in partial.codes.items() if code is None) | partial.has_progress
    return bits.to_bytes(PARTIAL_OCTETS, "little")


def _fitting(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size]


def read_suspects(content: bytes) -> Iterator[RenderSuspect]:
    for index in range(RENDERINGS):
        email_id, token = RENDERING.unpack_from(content, RENDERING_AT + index * RENDERING.size)
        if email_id != bytes(16):
            yield RenderSuspect(UUID(bytes=email_id), token)


def read_slot(slot: bytes) -> InFlightAttempt | None:
    wire = _part(slot, WIRE_AT, WIRE)
    if slot[0] == EMPTY or wire is None:
        return None
    email_id, token, number, started_at, policy, provider = WIRE.unpack(wire)
    answer = _part(slot, ANSWER_AT, ANSWER, begun=crc32(wire)) if slot[0] == ANSWERED else None
    finished_at, outcome = _unpack_answer(answer) if answer else (None, None)
    return InFlightAttempt(
        email_id=UUID(bytes=email_id),
        lease_token=token,
        attempt_number=number,
        provider=_text(provider) or "",
        started_at=started_at,
        policy=POLICIES[policy],
        finished_at=finished_at,
        outcome=outcome,
    )


def _part(slot: bytes, at: int, layout: struct.Struct, begun: int = 0) -> bytes | None:
    part = slot[at : at + layout.size]
    (checksum,) = CHECKSUM.unpack_from(slot, at + layout.size)
    return part if crc32(part, begun) == checksum else None


def _unpack_answer(part: bytes) -> tuple[float, Outcome]:
    finished_at, kind, retry_after, reason, code, message_id, detail = ANSWER.unpack(part)
    match OUTCOMES[kind].__name__:
        case "Accepted":
            return finished_at, Accepted(_text(message_id), _text(detail))
        case "Deferred":
            wait = None if math.isnan(retry_after) else retry_after
            bits = int.from_bytes(message_id, "little")
            got_it = dict.fromkeys(position for position in range(1, bits.bit_length()) if bits >> position & 1)
            partial = PartialDelivery(got_it, has_progress=bool(bits & 1)) if got_it else None
            return finished_at, Deferred(Reason(_text(reason) or ""), _text(detail), _text(code), wait, partial=partial)
        case "Rejected":
            return finished_at, Rejected(Reason(_text(reason) or ""), _text(detail), _text(code))
        case _:
            return finished_at, Uncertain(_text(detail), _text(code))


def _text(field: bytes) -> str | None:
    return field.rstrip(b"\0").decode("utf-8", "ignore") or None
