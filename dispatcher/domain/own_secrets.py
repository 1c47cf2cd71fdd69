"""Removes our own passwords and keys from texts, because servers repeat what we sent.

A server may repeat a secret in clear, percent-encoded, in xtext (RFC 3461), escaped for JSON or HTML, or in Base64:
alone, or as a part of a longer text, such as `\\0user\\0password`. Base64 encodes three octets at a time, so a secret
has three forms there.
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
