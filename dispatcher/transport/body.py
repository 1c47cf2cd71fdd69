"""Bodies of emails and requests, which are sent without a second copy of their attachments in memory.

A body is a sequence of parts. The part of an attachment holds the octets that PostgreSQL returned. While the body is
sent, these octets are encoded to Base64 piece by piece. The length of a body is known before any part is encoded, so
HTTP and SMTP can announce the length.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode, encodebytes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Final

import orjson

from dispatcher.domain.values import dataclass, field

PIECE_OCTETS: Final = 64 * 1024
"""The largest piece for one write. The pieces are small, because asyncio's TLS copies all data of a write into memory,
and counts the copied data as written."""
_LINE_OCTETS: Final = 57
"""The octets in a Base64 line of 76 characters (RFC 2045, section 6.8)."""
_STEP_OCTETS: Final = 768 * _LINE_OCTETS
"""How many octets are encoded at a time: whole lines, and a multiple of three, so that no piece needs padding."""


@dataclass(frozen=True, slots=True)
class Base64Content:
    """Content that is sent as Base64: with `has_lines`, in lines that end in CRLF, as MIME requires."""

    content: bytes = field(repr=False)
    has_lines: bool = False

    def __len__(self) -> int:
        octets = len(self.content)
        line_ends = -(-octets // _LINE_OCTETS) * 2 if self.has_lines else 0
        return (octets + 2) // 3 * 4 + line_ends

    def pieces(self) -> Iterator[bytes]:
        view = memoryview(self.content)
        for start in range(0, len(view), _STEP_OCTETS):
            step = view[start : start + _STEP_OCTETS]
            yield encodebytes(step).replace(b"\n", b"\r\n") if self.has_lines else b64encode(step)


@dataclass(frozen=True, slots=True)
class Base64Body:
    """A whole body that is sent as Base64, on one long line, such as a MIME message in a JSON document."""

    body: Body

    def __len__(self) -> int:
        return (len(self.body) + 2) // 3 * 4

    def pieces(self) -> Iterator[bytes]:
        rest = b""
        for piece in self.body.pieces():
            octets = rest + piece
            whole = len(octets) - len(octets) % 3
            rest = octets[whole:]
            for start in range(0, whole, _STEP_OCTETS):
                yield b64encode(octets[start : min(start + _STEP_OCTETS, whole)])
        yield b64encode(rest)


@dataclass(frozen=True, slots=True)
class Body:
    """The octets of a body, in parts. `bytes(body)` encodes and joins the parts."""

    parts: Sequence[bytes | Base64Content | Base64Body] = field(repr=False)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yields the octets in order, at most PIECE_OCTETS at a time."""
        for part in self.parts:
            if isinstance(part, bytes):
                yield from (part[start : start + PIECE_OCTETS] for start in range(0, len(part), PIECE_OCTETS))
            else:
                yield from part.pieces()


def with_attachments(body: bytes, files: Iterable[tuple[Mapping[str, str], bytes]]) -> Body:
    """Adds the member `attachments` to a JSON object. Returns the longer object as a body in parts.

    `files`: for each attachment, its JSON object without the member `content`, and the content's octets, which are
    written as Base64, because Base64 needs no escapes in JSON.
    """
    parts: list[bytes | Base64Content] = []
    before = body[:-1] + b',"attachments":['
    for described, content in files:
        parts += (before + orjson.dumps(described)[:-1] + b',"content":"', Base64Content(content))
        before = b'"},'
    return Body((*parts, b'"}]}'))


async def sha256_of(body: bytes | Body) -> str:
    """The SHA-256 of a body in hexadecimal; yields to the event loop between the pieces of a large body."""
    if isinstance(body, bytes):
        return sha256(body).hexdigest()
    digest = sha256()
    for piece in body.pieces():
        digest.update(piece)
        await asyncio.sleep(0)
    return digest.hexdigest()
