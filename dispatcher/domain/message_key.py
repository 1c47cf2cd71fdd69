"""The length limit of a message key. The limit has its own module, so that other modules need not import the email
rules."""

from __future__ import annotations

from typing import Final

MAX_KEY_CHARACTERS: Final = 255
"""The longest message key or correlation id. In UTF-8, it always fits an index entry of PostgreSQL (2,704 octets)."""
