"""The envelope sender of an email, to which servers return bounces: `bounces+<token>@example.com`.

The token is the email's id and an HMAC of the id, in hexadecimal, because some servers change the case of local parts.
A server sees the token only in the envelope of the email. So a message that contains a valid token proves that we
transmitted the email. A message without a valid token proves nothing.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from itertools import islice
from typing import Final
from uuid import UUID

MAX_MAILBOX_OCTETS: Final = 15
"""The longest mailbox name, the part before the plus. With the plus and the token, the local part then has the 64
octets that RFC 5321 allows (section 4.5.3.1.1)."""
_MAC_DIGITS: Final = 16
"""The length of the HMAC in hexadecimal digits. 64 bits are enough, because an attacker must send us an email for every
MAX_TOKENS guesses."""
MAX_TOKENS: Final = 50
"""The most different tokens of a text that are verified."""


class BounceAddress:
    """Creates and verifies envelope senders: one address per email, all of one mailbox that receives bounces."""

    def __init__(self, mailbox: str, keys: Sequence[bytes]) -> None:
        """`mailbox` has no token. The first key signs new tokens; tokens of all keys are valid."""
        local, _, domain = mailbox.rpartition("@")
        self._before = f"{local}+"
        self._after = f"@{domain}"
        self._keys = keys
        # The domain is not compared, because a server may rewrite it.
        self._token = re.compile(rf"{re.escape(local.lower())}\+([0-9a-f]{{32}})([0-9a-f]{{{_MAC_DIGITS}}})@")

    def of(self, email_id: UUID) -> str:
        """The envelope sender of an email. Every attempt gets the same envelope sender, unless the key changes."""
        digits = email_id.hex
        return f"{self._before}{digits}{_mac(self._keys[0], digits)}{self._after}"

    def find(self, text: str) -> UUID | None:
        """The id of the first email whose envelope sender is in the text; None if the text has no valid token."""
        found = dict.fromkeys(self._token.findall(text.lower()))
        for digits, mac in islice(found, MAX_TOKENS):
            if any(hmac.compare_digest(mac, _mac(key, digits)) for key in self._keys):
                return UUID(digits)
        return None


def _mac(key: bytes, digits: str) -> str:
    return hmac.digest(key, digits.encode(), "sha256").hex()[:_MAC_DIGITS]
