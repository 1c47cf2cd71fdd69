"""Which email a message is: its message key, and what two submissions of the same message have in common."""

from __future__ import annotations

import re
from base64 import b32encode
from collections.abc import Callable
from hashlib import sha256
from itertools import islice
from typing import Final, NamedTuple

from dispatcher.admission.problems import FieldError, Problem
from dispatcher.admission.validation import KEY_HEADER, KEY_RULE, key_from_header
from dispatcher.domain.text import MAX_KEY_CHARACTERS

_DIGEST_CHARACTERS: Final = 26
_ANEW: Final = rb"(?:received|return-path|date|message-id|idempotency-key|dkim-signature|arc-[a-z-]+)"
"""Headers that can differ when a client submits a message again."""
_BOUNDARY: Final = re.compile(rb'boundary="?([^"\s;]{8,70})', re.IGNORECASE)
_FIELD: Final = re.compile(rb"\r\n([!-9;-~]+)[ \t]*:(?:[^\r]|\r\n(?=[ \t]))*")
_MOST_BOUNDARIES: Final = 16
"""More are not looked for: each takes a pass over the content."""


class Name(NamedTuple):
    message_key: str
    is_given: bool
    """Whether the client gave the key in the header Idempotency-Key. Otherwise, the key is derived."""


def head_of(content: bytes) -> bytes:
    """The message's headers, after a CRLF."""
    if content.startswith(b"\r\n"):
        return b"\r\n"
    end = content.find(b"\r\n\r\n")
    return b"\r\n" + (content if end < 0 else content[: end + 2])


def values_of(head: bytes, name: bytes) -> list[bytes]:
    """The values of a header, without the CRLF of folded lines."""
    found = re.findall(rb"(?i)\r\n" + name + rb"[ \t]*:((?:[^\r]|\r\n(?=[ \t]))*)", head)
    return [value.replace(b"\r\n", b"").strip() for value in found]


def without_headers(content: bytes, is_kept: Callable[[str], bool]) -> bytes:
    """The message without the headers whose names are not kept."""
    head = head_of(content)
    kept = _FIELD.sub(lambda found: found[0] if is_kept(found[1].decode()) else b"", head)
    return kept[2:] + content[len(head) - 2 :]


def name_of(content: bytes, envelope_sender: str) -> Name:
    """The message key: of the header Idempotency-Key, else derived from Message-ID and envelope sender, else from the
    content. Raises a problem."""
    head = head_of(content)
    if given := values_of(head, KEY_HEADER.encode()):
        key = key_from_header(given[0].decode("ascii", "replace")) if len(given) == 1 else None
        if key is None:
            raise Problem("idempotency-key-invalid", errors=[FieldError("header", KEY_HEADER, f"must be {KEY_RULE}")])
        return Name(key, is_given=True)
    message_ids = [each for each in values_of(head, b"message-id") if each]
    # Without a Message-ID, the Date stays part of the content: two equal messages of different times are two emails.
    rest = re.sub(rb"(?i)\r\n(?:received|return-path)[ \t]*:(?:[^\r]|\r\n(?=[ \t]))*", b"", head)
    name = message_ids[0] if message_ids else rest + content[len(head) - 2 :]
    return Name(f"smtp-{_digest(envelope_sender.encode(), name)}", is_given=False)


def key_of_recipient(key: str, address: str) -> str:
    """The message key of an email for one recipient of a message, if another email holds the message's own key."""
    if len(key) + 1 + _DIGEST_CHARACTERS > MAX_KEY_CHARACTERS:
        key = f"smtp-{_digest(key.encode())}"
    return f"{key}/{_digest(address.encode())}"


def fingerprint_of(content: bytes, *, is_test: bool) -> bytes:
    """A digest of what two submissions of one message have in common, whoever their recipients are. `is_test`: of a
    test key, so that a real message is never taken for a repetition of a test."""
    head = head_of(content)
    body = content[len(head) - 2 :]
    for boundary in {found[1] for found in islice(_BOUNDARY.finditer(content), _MOST_BOUNDARIES)}:
        head, body = head.replace(boundary, b"="), body.replace(boundary, b"=")
    head = re.sub(rb"(?i)\r\n" + _ANEW + rb"[ \t]*:(?:[^\r]|\r\n(?=[ \t]))*", b"", head)
    return sha256((b"smtp test" if is_test else b"smtp 1") + head + body).digest()


def _digest(*parts: bytes) -> str:
    digest = sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()
    return b32encode(digest).decode().lower()[:_DIGEST_CHARACTERS]
