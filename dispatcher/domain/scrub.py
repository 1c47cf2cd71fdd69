"""Makes a provider's error text safe to store and to log: short, without addresses, credentials or control characters.

`echo` also removes everything that repeats a part of the email.
"""

from __future__ import annotations

import re
from typing import Final

from dispatcher.domain.own_secrets import CREDENTIAL_WORD, OWN_SECRETS, contains_any

MAX_CHARACTERS: Final = 500
"""Enough for a sentence about a provider's policy, and a link. Keeps a hostile server from filling the column."""
ADDRESS_WORD: Final = "<address>"
ENCODED_WORD: Final = "<encoded>"

_READ_CHARACTERS: Final = 8 * MAX_CHARACTERS
"""Only the start of the text, up to this length, is scrubbed and then truncated. A longer text takes no more time."""
_AT: Final = re.compile(r"@|\uff20|\ufe6b|%40|=40|\+40")
"""The at sign, its look-alikes, and its forms in URLs, quoted-printable and variable envelope senders."""
# White space other than the space; C0 and C1 controls; zero-width and reordering marks; lone surrogates.
_UNPRINTABLE: Final = re.compile(
    r"(?:[^\S ]|[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff])+"
)
# Credentials that have a known form: HTTP schemes, SendGrid and Resend keys, AWS ids and signatures.
_CREDENTIAL: Final = re.compile(
    r"\b(?:(?:Bearer|Basic|AWS4-HMAC-SHA256)\s+(?=\S*[\d=/+_])\S+|SG\.[\w-]+(?:\.[\w-]+)*|re_(?=\w*\d)\w{8,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}\b)",
    re.IGNORECASE,
)
_CREDENTIAL_PARTS: Final = ("bearer", "basic", "aws4-", "sg.", "re_", "akia", "asia")
"""An ASCII text that `_CREDENTIAL` matches contains one of these parts. A search for the parts is ten times as fast."""
_ENCODED: Final = re.compile(r"=\?[^?\s]{1,40}\?[bq]\?[^?\s]*(?:\?=)?", re.IGNORECASE)
"""An encoded word (RFC 2047): a subject or a name."""
_SPACES: Final = re.compile(r" {2,}")
# A quoted local part can contain spaces, and a domain can be an IP address in brackets.
_WORD: Final = re.compile(r"""<?(?:"[^"<>]{0,254}")?[^\s<>()\[\],;:"]+(?:\[[^\[\]]{0,64}\])?>?""")


def scrub(words: str) -> str:
    """The text on one line, at most `MAX_CHARACTERS` long, without credentials, and without addresses: any word with an
    at sign, because addresses have unusual forms. Idempotent."""
    words = OWN_SECRETS.without(words[:_READ_CHARACTERS])
    if not (words.isascii() and words.isprintable()):
        words = _UNPRINTABLE.sub(" ", words)
    if "=?" in words:
        words = _ENCODED.sub(ENCODED_WORD, words)
    if _may_have_credential(words):
        words = _CREDENTIAL.sub(CREDENTIAL_WORD, words)
    if _AT.search(words):
        words = _WORD.sub(_without_address, words)
    if "  " in words:
        words = _SPACES.sub(" ", words)
    words = words.strip(" ")
    return words if len(words) <= MAX_CHARACTERS else words[: MAX_CHARACTERS - 1] + "…"


def _may_have_credential(words: str) -> bool:
    # `_CREDENTIAL` ignores case, so its `s` also matches a long s (U+017F), but the search below would not find a
    # credential with a long s. So return True for any text that is not ASCII.
    if not words.isascii():
        return True
    return contains_any(words.lower(), _CREDENTIAL_PARTS)


def _without_address(word: re.Match[str]) -> str:
    return ADDRESS_WORD if _AT.search(word[0]) else word[0]
