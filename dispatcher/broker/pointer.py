"""The body of a message: which email to send. It never contains an email's content. PostgreSQL is the source of truth;
a message is only a hint.

The body is `{"v": 1, "email_id": "…", "message_key": "…"}`. The message's correlation id is an AMQP property, and its
trace context is a header, because tools look for them there. A message that was published by hand may lack both.
Additional fields are allowed. A dead letter starts with the same three fields. So if a dead letter is moved to a send
queue, the worker finds its email.

A bundle points to several emails: `{"v": 2, "emails": [{"email_id": "…", "message_key": "…"}, …]}`. The correlation ids
and trace contexts of a bundle's emails are only in the emails' rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID, SafeUUID

import orjson

from dispatcher.config import MAX_BUNDLE_EMAILS
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.errors import InvalidPointer

VERSION: Final = 1
BUNDLE_VERSION: Final = 2
MAX_BODY_OCTETS: Final = 64 * 1024
"""The longest body that is parsed. Our own pointers, bundles and dead letters are shorter."""
TRACEPARENT: Final = "traceparent"

_HEX: Final = "[0-9A-Fa-f]"
# A pattern with a repeated group or with the ignore-case flag would take twice the time.
_UUID: Final = re.compile(f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}")
_set_number, _set_safety = (vars(UUID)[name].__set__ for name in ("int", "is_safe"))

# Enqueue refuses all unprintable characters. This module refuses only control characters, because the application's
# Python may have a newer Unicode version, with more printable characters.
_CONTROLS: Final = re.compile("[\\x00-\\x1f\\x7f]")


class Pointer(NamedTuple):
    """A pointer to one email. A tuple for speed: thousands are created per second."""

    email_id: UUID
    message_key: str
    correlation_id: str | None = None  # for the AMQP property of this name; None in pointers that `decode` returns
    traceparent: str | None = None  # for the header of this name; None in pointers that `decode` returns


def encode(pointer: Pointer) -> bytes:
    """The body of a message with one pointer."""
    return orjson.dumps({"v": VERSION, "email_id": pointer.email_id, "message_key": pointer.message_key})


def encode_bundle(pointers: Sequence[Pointer]) -> bytes:
    """The body of a bundle of at most `config.MAX_BUNDLE_EMAILS` emails."""
    emails = [{"email_id": pointer.email_id, "message_key": pointer.message_key} for pointer in pointers]
    return orjson.dumps({"v": BUNDLE_VERSION, "emails": emails})


def id_text(email_id: UUID) -> str:
    """An id as text. `str` takes four times as long."""
    return orjson.dumps(email_id)[1:-1].decode()


def decode(body: bytes) -> list[Pointer]:
    """The pointers in a message body, without correlation ids and trace contexts. Raises InvalidPointer."""
    fields = _object(body)
    version = _version(fields)
    if version == VERSION:
        return [Pointer(email_id(fields), message_key(fields))]
    if version == BUNDLE_VERSION:
        emails = fields.get("emails")
        if type(emails) is not list or not 1 <= len(emails) <= MAX_BUNDLE_EMAILS:
            raise InvalidPointer(f'"emails" is missing or is not a list of 1 to {MAX_BUNDLE_EMAILS} entries.')
        if not all(type(each) is dict for each in emails):
            raise InvalidPointer('"emails" contains a value that is not a JSON object.')
        return [Pointer(email_id(each), message_key(each)) for each in emails]
    raise InvalidPointer(f'The version "v" must be {VERSION} or {BUNDLE_VERSION}.')


def decode_fields(body: bytes) -> Mapping[str, Any]:
    """The fields of a body about one email. Only the version is checked. Raises InvalidPointer."""
    fields = _object(body)
    if _version(fields) != VERSION:
        raise InvalidPointer(f'The version "v" must be {VERSION}.')
    return fields


def _object(body: bytes) -> Mapping[str, Any]:
    if len(body) > MAX_BODY_OCTETS:
        raise InvalidPointer(f"The body has {len(body)} bytes; the limit is {MAX_BODY_OCTETS}.")
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise InvalidPointer("The body is not JSON.") from None
    if type(fields) is not dict:
        raise InvalidPointer("The body is not a JSON object.")
    return fields


def _version(fields: Mapping[str, Any]) -> int | None:
    version = fields.get("v")
    return version if type(version) is int else None


def email_id(fields: Mapping[str, Any]) -> UUID:
    text = fields.get("email_id")
    if type(text) is not str or not _UUID.fullmatch(text):
        raise InvalidPointer('"email_id" is missing or is not a UUID.')
    # Without `UUID.__init__`, which checks the text again and takes three times as long.
    found = UUID.__new__(UUID)
    _set_number(found, int(text.replace("-", ""), 16))
    _set_safety(found, SafeUUID.unknown)
    return found


def message_key(fields: Mapping[str, Any]) -> str:
    text = fields.get("message_key")
    if (
        type(text) is str
        and 1 <= len(text) <= MAX_KEY_CHARACTERS
        and (text.isprintable() or not _CONTROLS.search(text))
    ):
        return text
    raise InvalidPointer(
        f'"message_key" is missing, is not 1 to {MAX_KEY_CHARACTERS} characters long, or contains control characters.'
    )
