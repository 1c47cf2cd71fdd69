"""What a message without an email is called: it has no id, so it is known by its bytes."""

from __future__ import annotations

import re
from typing import Final

_PREFIX: Final = "p-"
_FINGERPRINT_CHARACTERS: Final = 12
_POISON_ID: Final = re.compile(f"{_PREFIX}[0-9a-f]{{{_FINGERPRINT_CHARACTERS}}}")


def poison_id(body: bytes) -> str:
    """`p-` and the beginning of its bytes' SHA-256: the same bytes have the same one."""
    from hashlib import sha256  # OpenSSL takes its time to load, and who only asks `is_poison_id` does without

    return _PREFIX + sha256(body).hexdigest()[:_FINGERPRINT_CHARACTERS]


def is_poison_id(name: str) -> bool:
    """Whether a name is such a one; an email's id never is, and hardly a message key."""
    return _POISON_ID.fullmatch(name) is not None
