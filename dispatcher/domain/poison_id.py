"""The id of a poison message: a message that points to no email. The id is derived from the message's bytes."""

from __future__ import annotations

import re
from typing import Final

_PREFIX: Final = "p-"
_FINGERPRINT_CHARACTERS: Final = 12
_POISON_ID: Final = re.compile(f"{_PREFIX}[0-9a-f]{{{_FINGERPRINT_CHARACTERS}}}")


def poison_id(body: bytes) -> str:
    """`p-` and the start of the body's SHA-256. Equal bytes have equal ids."""
    from hashlib import sha256  # Imported here, because OpenSSL loads slowly and `is_poison_id` does not need it.

    return _PREFIX + sha256(body).hexdigest()[:_FINGERPRINT_CHARACTERS]


def is_poison_id(name: str) -> bool:
    """Whether a name has the form of a poison id. An email id never has this form, but a message key might, by
    chance."""
    return _POISON_ID.fullmatch(name) is not None
