"""API keys: how one looks, what it may do, and how its secret is compared.

    ed_k3v9q0xw2m7a_q1bU…     prefix, id (shown in lists), secret (shown once)

The secret is 32 bytes of the kernel's randomness. That is why one round of SHA-256 keeps it: bcrypt and its like slow
down the guessing of passwords that people make up, and nobody guesses 256 bits; here they would only slow down every
request.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from hmac import compare_digest
from typing import Final

_LETTERS: Final = "abcdefghijkmnpqrstuvwxyz23456789"
_ID_LETTERS: Final = 12
_FORM: Final = re.compile(r"ed_([a-z0-9]{12})_([A-Za-z0-9_-]{43})", re.ASCII)


class Scope(StrEnum):
    """What a key may be good for."""

    SEND = "send"
    """Enqueue emails."""
    READ = "read"
    """Look at emails: what became of them, never their content."""
    OPERATE = "operate"
    """Decide about emails that failed or are held."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A key as its owner has it."""

    key_id: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
        """A key that nobody else has."""
        return cls("".join(secrets.choice(_LETTERS) for _ in range(_ID_LETTERS)), secrets.token_urlsafe(32))

    @classmethod
    def parse(cls, text: str) -> Secret | None:
        """The key that a text is; None if it is none."""
        match = _FORM.fullmatch(text)
        return cls(match[1], match[2]) if match else None

    def text(self) -> str:
        """The key as it is handed out, once."""
        return f"{shown(self.key_id)}_{self.secret}"

    def hashed(self) -> bytes:
        """What is stored of it."""
        return sha256(self.secret.encode()).digest()

    def matches(self, stored: bytes) -> bool:
        """Whether it is the key of which this was stored; takes as long either way."""
        return compare_digest(self.hashed(), stored)


def shown(key_id: str) -> str:
    """How a list shows a key."""
    return f"ed_{key_id}"
