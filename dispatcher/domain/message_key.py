"""The length limit of a message key, in a module that does not import the email rules."""

from __future__ import annotations

from typing import Final

MAX_KEY_CHARACTERS: Final = 255
"""For message key and correlation id. Long enough for any scheme; fits an index entry (2,704 octets) in UTF-8."""
