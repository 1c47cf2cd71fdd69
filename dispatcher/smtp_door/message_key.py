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
from dispatcher.domain.raw_mime import fields_of, head_of
from dispatcher.domain.text import MAX_KEY_CHARACTERS

_DIGEST_CHARACTERS: Final = 26
_OF_SERVERS: Final = frozenset({"received", "return-path"})
_ANEW: Final = re.compile("received|return-path|date|message-id|idempotency-key|dkim-signature|arc-[a-z-]+")
"""Headers that can differ when a client submits a message again."""
_BOUNDARY: Final = re.compile(rb'boundary="?([^"\s;]{8,70})', re.IGNORECASE)
_MOST_BOUNDARIES: Final = 16
"""More are not looked for: each takes a pass over the content."""


class Name(NamedTuple):
    message_key: str
    is_given: bool
    """Whether the client gave the key in the header Idempotency-Key. Otherwise, the key is derived."""


class Submission:
    """A message as a client submits it, with its header fields. Raises InvalidEmail if it has none that can be read."""

    def __init__(self, content: bytes) -> None:
        head = head_of(content)
        self.content = content
        self._fields = list(fields_of(head))
        self._body = content[len(head) :]

    def values(self, name: str) -> list[bytes]:
        """The values of a header, whose name is in lower case; without the CRLF of folded lines."""
        fields = [field for each, field in self._fields if each == name]
        return [field.partition(b":")[2].replace(b"\r\n", b"").strip() for field in fields]

    def with_headers(self, is_kept: Callable[[str], object]) -> bytes:
        """The message with only those headers whose names, in lower case, are kept."""
        return b"".join([field for name, field in self._fields if is_kept(name)]) + self._body

    def name(self, envelope_sender: str) -> Name:
        """The message key: of the header Idempotency-Key, else derived from Message-ID and envelope sender, else from
        the content. Raises a problem."""
        if given := self.values(KEY_HEADER.lower()):
            key = key_from_header(given[0].decode("ascii", "replace")) if len(given) == 1 else None
            if key is None:
                error = FieldError("header", KEY_HEADER, f"must be {KEY_RULE}")
                raise Problem("idempotency-key-invalid", errors=[error])
            return Name(key, is_given=True)
        message_ids = [each for each in self.values("message-id") if each]
        # Without a Message-ID, the Date is part of the name: two equal messages of different times are two emails.
        name = message_ids[0] if message_ids else self.with_headers(lambda each: each not in _OF_SERVERS)
        return Name(f"smtp-{_digest(envelope_sender.encode(), name)}", is_given=False)

    def fingerprint(self, *, is_test: bool) -> bytes:
        """A digest of what two submissions of one message have in common, also with other recipients. `is_test`: of a
        test key, so that a real message is never taken for a repetition of a test."""
        rest = self.with_headers(lambda name: not _ANEW.fullmatch(name))
        for boundary in {found[1] for found in islice(_BOUNDARY.finditer(self.content), _MOST_BOUNDARIES)}:
            rest = rest.replace(boundary, b"=")
        return sha256((b"smtp test" if is_test else b"smtp 1") + rest).digest()


def key_of_recipient(key: str, address: str) -> str:
    """The message key of an email for one recipient of a message, if another email holds the message's own key."""
    if len(key) + 1 + _DIGEST_CHARACTERS > MAX_KEY_CHARACTERS:
        key = f"smtp-{_digest(key.encode())}"
    return f"{key}/{_digest(address.encode())}"


def _digest(*parts: bytes) -> str:
    digest = sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()
    return b32encode(digest).decode().lower()[:_DIGEST_CHARACTERS]
