"""What a message says: which email is due. Never content; the database is the truth, a message is only a hint.

The body is `{"v": 1, "email_id": "…", "message_key": "…"}`. Correlation id and trace context travel as AMQP property
and header, where tools look for them; a message published by hand may lack them. Further fields are allowed: a dead
letter begins with the same three, so one that is put back on the send queue points to its email.

A bundle points to several: `{"v": 2, "emails": [{"email_id": "…", "message_key": "…"}, …]}`. Correlation ids and trace
contexts are then in the emails' rows alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from dispatcher.config import MAX_BUNDLE_EMAILS
from dispatcher.domain.message_key import MAX_KEY_CHARACTERS
from dispatcher.errors import InvalidPointer

VERSION: Final = 1
BUNDLE_VERSION: Final = 2
MAX_BODY_OCTETS: Final = 64 * 1024
"""Two orders of magnitude above any pointer or dead letter of ours; what is larger is refused unread."""
TRACEPARENT: Final = "traceparent"

_HEX: Final = "[0-9A-Fa-f]"
# Spelt out: with a group that repeats, and a flag for the case, it takes twice as long.
_UUID: Final = re.compile(f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}")


# Enqueue refuses more, such as what does not print: but by the Unicode of its Python, which may be newer than ours.
_CONTROLS: Final = re.compile("[\\x00-\\x1f\\x7f]")


class Pointer(NamedTuple):
    """A message that points to an email. A tuple: there are thousands a second.

    Attributes:
        correlation_id: For the message's property; None where there is none, and in what was decoded.
        traceparent: W3C trace context, for its header; None likewise.
    """

    email_id: UUID
    message_key: str
    correlation_id: str | None = None
    traceparent: str | None = None


def encode(pointer: Pointer) -> bytes:
    """The message's body."""
    return orjson.dumps({"v": VERSION, "email_id": pointer.email_id, "message_key": pointer.message_key})


def encode_bundle(pointers: Sequence[Pointer]) -> bytes:
    """The body of a message that points to several emails, at most `config.MAX_BUNDLE_EMAILS`."""
    emails = [{"email_id": pointer.email_id, "message_key": pointer.message_key} for pointer in pointers]
    return orjson.dumps({"v": BUNDLE_VERSION, "emails": emails})


def id_text(email_id: UUID) -> str:
    """An id as it stands in the body; `str` takes four times as long."""
    return orjson.dumps(email_id)[1:-1].decode()


def decode(body: bytes) -> list[Pointer]:
    """The pointers that a message carries, of one email or of several, without what its properties tell.

    Raises:
        InvalidPointer: for whatever else it carries, be it for one email of many; with the reason, which holds nothing
            of the message.
    """
    fields = _object(body)
    version = _version(fields)
    if version == VERSION:
        return [Pointer(email_id(fields), message_key(fields))]
    if version == BUNDLE_VERSION:
        return [Pointer(email_id(each), message_key(each)) for each in _bundled(fields)]
    raise InvalidPointer(f'"v" is neither {VERSION} nor {BUNDLE_VERSION}, the versions that we know.')


def decode_fields(body: bytes) -> Mapping[str, Any]:
    """The fields of a body of ours that tells of one email, their values unchecked except for the version.

    Raises:
        InvalidPointer: it is no JSON object, too large, or of a version that we do not know.
    """
    fields = _object(body)
    if _version(fields) != VERSION:
        raise InvalidPointer(f'"v" is not {VERSION}, the version that we know.')
    return fields


def _object(body: bytes) -> Mapping[str, Any]:
    if len(body) > MAX_BODY_OCTETS:
        raise InvalidPointer(f"The body has {len(body)} octets; no message of ours has more than {MAX_BODY_OCTETS}.")
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


def _bundled(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    emails = fields.get("emails")
    if type(emails) is not list or not 1 <= len(emails) <= MAX_BUNDLE_EMAILS:
        raise InvalidPointer(f'"emails" is missing or no list of 1 to {MAX_BUNDLE_EMAILS}.')
    if not all(type(each) is dict for each in emails):
        raise InvalidPointer('"emails" holds what is no JSON object.')
    return emails


def email_id(fields: Mapping[str, Any]) -> UUID:
    """The email's id.

    Raises:
        InvalidPointer: there is none.
    """
    text = fields.get("email_id")
    if type(text) is not str or not _UUID.fullmatch(text):
        raise InvalidPointer('"email_id" is missing or not a UUID.')
    return UUID(text)


def message_key(fields: Mapping[str, Any]) -> str:
    """The email's message key.

    Raises:
        InvalidPointer: there is none, or one that no enqueue lets through.
    """
    text = fields.get("message_key")
    if (
        type(text) is not str
        or not 1 <= len(text) <= MAX_KEY_CHARACTERS
        or (not text.isprintable() and _CONTROLS.search(text))
    ):
        raise InvalidPointer(
            f'"message_key" is missing or not 1 to {MAX_KEY_CHARACTERS} characters without control characters.'
        )
    return text
