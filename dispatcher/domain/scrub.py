"""A provider's words, made safe to store and to log: no addresses, no credentials, no control characters, bounded.

What they repeat of the email itself `echo` leaves out.
"""

from __future__ import annotations

import re
from typing import Final

MAX_CHARACTERS: Final = 500
"""Enough for a policy sentence and its link; a hostile server fills no column with more."""
ADDRESS_WORD: Final = "<address>"
CREDENTIAL_WORD: Final = "<credential>"
ENCODED_WORD: Final = "<encoded>"

_READ_CHARACTERS: Final = 8 * MAX_CHARACTERS
"""What is looked at before cutting, so that a megabyte of words costs nothing."""
_AT: Final = re.compile(r"@|\uff20|\ufe6b|%40|=40|\+40", re.IGNORECASE)
"""At signs: the one, its look-alikes, and as URLs, quoted-printable and variable envelope senders write it."""
# White space but the space, C0 and C1 controls, zero-width and reordering marks, lone surrogates.
_UNPRINTABLE: Final = re.compile(
    r"(?:[^\S ]|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff])+"
)
# What we authenticate with, should somebody repeat it: HTTP's schemes, SendGrid's keys, AWS's ids and signatures.
_CREDENTIAL: Final = re.compile(
    r"\b(?:(?:Bearer|Basic|AWS4-HMAC-SHA256)\s+(?=\S*[\d=/+_])\S+|SG\.[\w-]+(?:\.[\w-]+)*|(?:AKIA|ASIA)[A-Z0-9]{16}\b)",
    re.IGNORECASE,
)
_MAY_BE_CREDENTIAL: Final = re.compile(r"bearer|basic|aws4-|sg\.|akia|asia", re.IGNORECASE)
_ENCODED: Final = re.compile(r"=\?[^?\s]{1,40}\?[bq]\?[^?\s]*(?:\?=)?", re.IGNORECASE)
"""A header's words as they travel (RFC 2047): a subject, a name."""
_SPACES: Final = re.compile(r" {2,}")
# A quoted local part may hold spaces, and a domain may be an address in brackets.
_WORD: Final = re.compile(r"""<?(?:"[^"<>]{0,64}")?[^\s<>()\[\],;:"]+(?:\[[^\[\]]{0,64}\])?>?""")


def scrub(words: str) -> str:
    """The words on one line, without addresses and credentials, at most `MAX_CHARACTERS` long.

    A word with an at sign in it counts as an address as a whole, so that odd forms of one do not slip through.
    Scrubbing twice changes nothing more.
    """
    words = words[:_READ_CHARACTERS]
    if not (words.isascii() and words.isprintable()):
        words = _UNPRINTABLE.sub(" ", words)
    if "=?" in words:
        words = _ENCODED.sub(ENCODED_WORD, words)
    if _MAY_BE_CREDENTIAL.search(words):
        words = _CREDENTIAL.sub(CREDENTIAL_WORD, words)
    if _AT.search(words):
        words = _WORD.sub(_without_address, words)
    words = _SPACES.sub(" ", words).strip(" ")
    return words if len(words) <= MAX_CHARACTERS else words[: MAX_CHARACTERS - 1] + "…"


def _without_address(word: re.Match[str]) -> str:
    return ADDRESS_WORD if _AT.search(word[0]) else word[0]
