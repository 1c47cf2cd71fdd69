"""The length limit of a message key. A module of its own, so that its users need not import the email rules."""

from __future__ import annotations

from typing import Final

MAX_KEY_CHARACTERS: Final = 255
"""The longest message key or correlation id. In UTF-8, it always fits an index entry of PostgreSQL (2,704 octets)."""
