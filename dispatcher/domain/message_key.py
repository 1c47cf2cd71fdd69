"""How long a message key may be: for those who read one and know nothing of emails."""

from __future__ import annotations

from typing import Final

MAX_KEY_CHARACTERS: Final = 255
"""Message key and correlation id: room for any key scheme, small enough for an index entry (2,704 octets) in UTF-8."""
