"""API keys: their format, their scopes, and the comparison of their secrets.

    ed_k3v9q0xw2m7a_q1bU…     prefix, id (shown in lists), secret (shown once)

PostgreSQL stores the SHA-256 of the secret. A slow hash such as bcrypt is not needed: it protects passwords that an
attacker can guess, because people chose them. This secret cannot be guessed, because it is 32 random bytes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from hmac import compare_digest
from typing import Final

_LETTERS: Final = "abcdefghijkmnpqrstuvwxyz23456789"
_ID_LETTERS: Final = 12
_FORM: Final = re.compile(r"ed_([a-z0-9]{12})_([A-Za-z0-9_-]{43})", re.ASCII)


class Scope(StrEnum):
    """An action that an API key permits."""

    SEND = "send"
    """Enqueue emails, and cancel or reschedule single emails that are not sent yet."""
    READ = "read"
    """Read the status of emails, never their content."""
    OPERATE = "operate"
    """Replay, discard, confirm or release emails that failed or are held; cancel or reschedule emails; suppress
    recipients."""
    IGNORE_SUPPRESSION = "ignore_suppression"
    """Enqueue emails that suppressed recipients get, too. The key also needs SEND."""
    CONTENT = "content"
    """With READ: also read the sender, the recipients and the subject of emails."""


@dataclass(frozen=True, slots=True)
class Secret:
    """An API key in clear text: its id and its secret."""

    key_id: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
        return cls("".join(secrets.choice(_LETTERS) for _ in range(_ID_LETTERS)), secrets.token_urlsafe(32))

    @classmethod
    def parse(cls, text: str) -> Secret | None:
        match = _FORM.fullmatch(text)
        return cls(match[1], match[2]) if match else None

    def text(self) -> str:
        """The full key as text, such as `ed_k3v9q0xw2m7a_q1bU…`. The key's owner sees this text once, when the key is
        created."""
        return f"{shown(self.key_id)}_{self.secret}"

    def hashed(self) -> bytes:
        """The SHA-256 of the secret, which PostgreSQL stores."""
        return sha256(self.secret.encode()).digest()

    def matches(self, stored: bytes) -> bool:
        """Whether `stored` is the hash of this secret. The comparison takes constant time."""
        return compare_digest(self.hashed(), stored)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the HTTP API, as operators see it: without its hash."""

    key_id: str
    name: str
    tenant_id: str | None  # the tenant that the key acts for; None if it acts for every tenant
    scopes: Sequence[str]
    # Domains that the key may send from. If these and `from_addresses` are None, it may send from any.
    from_domains: Sequence[str] | None
    from_addresses: Sequence[str] | None
    per_second: float | None
    recipients_per_day: int | None
    lane: str | None  # the lane of emails that do not name a lane
    allowed_lanes: Sequence[str]  # the lanes that an email may name, besides `lane`
    is_test: bool  # what the key enqueues never leaves
    created_at: datetime
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just created. Only its owner sees `key`, once."""

    key_id: str
    tenant_id: str | None
    key: str = field(default="", repr=False)


def shown(key_id: str) -> str:
    """The part of a key that is shown in lists: `ed_` and the id, without the secret."""
    return f"ed_{key_id}"
