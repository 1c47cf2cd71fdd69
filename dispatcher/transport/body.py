"""What goes on the wire for one email, without a second copy of its attachments in memory.

A body is a row of parts. An attachment stays as PostgreSQL gave it, and is put into Base64 piece by piece while the
connection takes it. The length is known before, so HTTP and SMTP can announce it.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode, encodebytes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

PIECE_OCTETS: Final = 64 * 1024
"""Given more at once, TLS takes all of it into memory, and it would count as written."""
_LINE_OCTETS: Final = 57
"""What a line of 76 characters of Base64 holds (RFC 2045, section 6.8)."""
_STEP_OCTETS: Final = 768 * _LINE_OCTETS
"""What makes a piece of Base64: whole lines, and a multiple of three."""


@dataclass(frozen=True, slots=True)
class InBase64:
    """Content that leaves in Base64.

    Attributes:
        content: The octets before encoding.
        has_lines: Whether the Base64 comes in lines that end in CRLF, as MIME wants it; else it is one long line.
    """

    content: bytes = field(repr=False)
    has_lines: bool = False

    def __len__(self) -> int:
        octets = len(self.content)
        line_ends = -(-octets // _LINE_OCTETS) * 2 if self.has_lines else 0
        return (octets + 2) // 3 * 4 + line_ends

    def pieces(self) -> Iterator[bytes]:
        """The Base64, encoded as it is asked for."""
        view = memoryview(self.content)
        for start in range(0, len(view), _STEP_OCTETS):
            step = view[start : start + _STEP_OCTETS]
            yield encodebytes(step).replace(b"\n", b"\r\n") if self.has_lines else b64encode(step)


@dataclass(frozen=True, slots=True)
class BodyInBase64:
    """A body that leaves in Base64 as a whole, as one long line."""

    body: Body

    def __len__(self) -> int:
        return (len(self.body) + 2) // 3 * 4

    def pieces(self) -> Iterator[bytes]:
        """The Base64, encoded as it is asked for."""
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
    """Octets in parts; `bytes()` joins them."""

    parts: Sequence[bytes | InBase64 | BodyInBase64] = field(repr=False)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The octets in order, at most PIECE_OCTETS at a time."""
        for part in self.parts:
            if isinstance(part, bytes):
                yield from (part[start : start + PIECE_OCTETS] for start in range(0, len(part), PIECE_OCTETS))
            else:
                yield from part.pieces()


async def digest_of(body: bytes | Body) -> str:
    """A body's SHA-256 in hexadecimal; the loop serves others while a large body is read."""
    if isinstance(body, bytes):
        return sha256(body).hexdigest()
    digest = sha256()
    for piece in body.pieces():
        digest.update(piece)
        await asyncio.sleep(0)
    return digest.hexdigest()
