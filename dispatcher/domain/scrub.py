"""Makes a provider's error text safe to store and to log: short, without addresses, credentials or control characters.

`provider_text` also removes everything that repeats a part of the email.

A server may repeat one of our secrets in clear, percent-encoded, in xtext (RFC 3461), escaped for JSON or HTML, or in
Base64: alone, or as a part of a longer text, such as `\\0user\\0password`. Base64 encodes three octets at a time, so a
secret has three forms there.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Final

CREDENTIAL_WORD: Final = "<credential>"
MIN_CHARACTERS: Final = 3
"""Shorter secrets are not removed, because they occur in every text."""
DISTINCT_CHARACTERS: Final = 8
"""A secret of at least this length is removed wherever it occurs; a shorter one only as a whole word."""
_BASE64: Final = re.compile(r"[\w+/%=-]{4,}", re.ASCII)
_BASE64_CHARACTERS: Final = 12
"""How many characters of a secret's Base64 form are compared, so that a form is found even if a server cuts it off."""


class Secrets:
    """Secrets to remove from texts, by their source. Empty until `register` is called."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Collection[str], Collection[str]]] = {}
        self._clear = re.compile(r"(?!)")
        self._encoded: set[str] = set()
        self._parts: set[str] = set()

    def register(self, source: str, secrets: Collection[str], names: Collection[str] = ()) -> None:
        """Adds the secrets of a source, such as a provider's settings, in place of its earlier ones. User names are
        removed only in Base64: in clear, they can be ordinary words."""
        self._known[source] = [each for each in secrets if len(each) >= MIN_CHARACTERS], names
        texts = sorted({each for known, _ in self._known.values() for each in known}, key=len, reverse=True)
        users = [each for _, known in self._known.values() for each in known]
        self._clear = re.compile("|".join(map(_pattern, texts)) or r"(?!)", re.IGNORECASE)
        self._encoded = {form for each in (*texts, *users) for form in _base64_forms(each)}
        # A text that contains a secret contains one of these parts. The search for them is much faster.
        self._parts = {max(re.findall(r"[a-z0-9]*", each.lower()), key=len) for each in (*texts, *self._encoded)}

    def without(self, text: str) -> str:
        """The text with `<credential>` in place of each secret."""
        # If letters' case is ignored, some letters that are not ASCII equal ASCII letters. So search such a text whole.
        if text.isascii() and not contains_any(text.lower(), self._parts):
            return text
        return _BASE64.sub(self._without_encoded, self._clear.sub(CREDENTIAL_WORD, text))

    def _without_encoded(self, word: re.Match[str]) -> str:
        folded = word[0].lower().replace("%2b", "+").replace("%2f", "/").replace("-", "+").replace("_", "/")
        return CREDENTIAL_WORD if contains_any(folded, self._encoded) else word[0]


def contains_any(text: str, parts: Iterable[str]) -> bool:
    """Whether the text contains one of the parts."""
    for part in parts:  # noqa: SIM110 - for short texts, `any` with a generator takes three times as long
        if part in text:
            return True
    return False


def _pattern(secret: str) -> str:
    characters = "".join(map(_character, secret))
    return characters if len(secret) >= DISTINCT_CHARACTERS else rf"(?<!\w){characters}(?!\w)"


def _character(character: str) -> str:
    """A pattern for a character in clear and in its escaped forms."""
    if character.isascii() and character.isalnum():
        return character
    hexadecimal = [f"{octet:02X}" for octet in character.encode("utf-8", "surrogateescape")]
    in_bytes = ["".join(f"{sign}{octet}" for octet in hexadecimal) for sign in "%+"]
    in_html = html.escape(character), f"&#{ord(character)};"
    in_json = json.dumps(character)[1:-1], rf"\{character}"
    forms = [*in_bytes, *in_html, *in_json, "+" if character == " " else character, character]
    # Each form once: with two equal forms, a secret of 30 such characters would be searched in 2**30 ways.
    return f"(?:{'|'.join(map(re.escape, dict.fromkeys(forms)))})"


def _base64_forms(secret: str) -> Iterator[str]:
    """The beginnings of the Base64 forms of a text, in lower case: after 0, 1 or 2 octets of a group of three."""
    octets = secret.encode("utf-8", "surrogateescape")
    for before in range(3):
        form = base64.b64encode(bytes(before) + octets).decode().lower()
        # Leave out characters that also depend on the octets before or after the secret.
        form = form[(before * 8 + 5) // 6 : (before + len(octets)) * 8 // 6][:_BASE64_CHARACTERS]
        if len(form) > MIN_CHARACTERS:
            yield form


OWN_SECRETS: Final = Secrets()
"""The secrets of this process. There is one object, because every text that a server sent must pass it."""


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
    # `_CREDENTIAL` ignores case, so its `s` also matches a long s (U+017F), but a search for the parts would not find a
    # credential with a long s. So search any text that is not ASCII.
    if not words.isascii() or contains_any(words.lower(), _CREDENTIAL_PARTS):
        words = _CREDENTIAL.sub(CREDENTIAL_WORD, words)
    if _AT.search(words):
        words = _WORD.sub(_without_address, words)
    if "  " in words:
        words = _SPACES.sub(" ", words)
    words = words.strip(" ")
    return words if len(words) <= MAX_CHARACTERS else words[: MAX_CHARACTERS - 1] + "…"


def _without_address(word: re.Match[str]) -> str:
    return ADDRESS_WORD if _AT.search(word[0]) else word[0]
