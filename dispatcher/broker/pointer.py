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
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

import orjson

from dispatcher.config import MOST_BUNDLED
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
# W3C Trace Context, section 3.2: version, trace id, parent id, flags.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


class Properties(Protocol):
    """The part of a message's AMQP properties that we read; strangers may have put anything there."""

    @property
    def correlation_id(self) -> Any:
        """A short string; bytes where it is not UTF-8."""

    @property
    def headers(self) -> Any:
        """A table; None if there is none."""


class Pointer(NamedTuple):
    """A message that points to an email. A tuple: there are thousands a second.

    Attributes:
        correlation_id: None where the message has none that we would have written.
        traceparent: W3C trace context; None likewise.
    """

    email_id: UUID
    message_key: str
    correlation_id: str | None = None
    traceparent: str | None = None


def encode(pointer: Pointer) -> bytes:
    """The message's body."""
    return orjson.dumps({"v": VERSION, "email_id": pointer.email_id, "message_key": pointer.message_key})


def encode_bundle(pointers: Sequence[Pointer]) -> bytes:
    """The body of a message that points to several emails, at most `config.MOST_BUNDLED`."""
    emails = [{"email_id": pointer.email_id, "message_key": pointer.message_key} for pointer in pointers]
    return orjson.dumps({"v": BUNDLE_VERSION, "emails": emails})


def id_text(email_id: UUID) -> str:
    """An id as it stands in the body; `str` takes four times as long."""
    return orjson.dumps(email_id)[1:-1].decode()


def decode(body: bytes, properties: Properties | None = None) -> Pointer:
    """The pointer that a message carries.

    Args:
        properties: None where nobody asks whose it is: a worker knows that from the email's row.

    Raises:
        InvalidPointer: for whatever else it carries; with the reason, which holds nothing of the message.
    """
    fields = decode_fields(body)
    if properties is None:
        return Pointer(email_id(fields), message_key(fields))
    return Pointer(email_id(fields), message_key(fields), _correlation_id(properties), _traceparent(properties))


def decode_all(body: bytes) -> list[Pointer]:
    """The pointers that a message carries, of one email or of several.

    Raises:
        InvalidPointer: for whatever else it carries, be it for one email of many; with the reason, which holds nothing
            of the message.
    """
    fields = _object(body)
    if _version(fields) != BUNDLE_VERSION:
        _check_version(fields)
        return [Pointer(email_id(fields), message_key(fields))]
    emails = fields.get("emails")
    if type(emails) is not list or not 1 <= len(emails) <= MOST_BUNDLED:
        raise InvalidPointer(f'"emails" is missing or no list of 1 to {MOST_BUNDLED}.')
    if not all(type(each) is dict for each in emails):
        raise InvalidPointer('"emails" holds what is no JSON object.')
    return [Pointer(email_id(each), message_key(each)) for each in emails]


def decode_fields(body: bytes) -> Mapping[str, Any]:
    """The fields of a body of ours that tells of one email, their values unchecked except for the version.

    Raises:
        InvalidPointer: it is no JSON object, too large, or of a version that we do not know.
    """
    fields = _object(body)
    _check_version(fields)
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


def _check_version(fields: Mapping[str, Any]) -> None:
    if _version(fields) != VERSION:
        raise InvalidPointer(f'"v" is not {VERSION}, the version that we know.')


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
        InvalidPointer: there is none, or one that enqueue would have refused.
    """
    text = fields.get("message_key")
    if type(text) is not str or not is_key(text):
        raise InvalidPointer(f'"message_key" is missing or not 1 to {MAX_KEY_CHARACTERS} characters that print.')
    return text


def is_key(text: str) -> bool:
    """Whether enqueue accepts it as message key or correlation id."""
    return 1 <= len(text) <= MAX_KEY_CHARACTERS and text.isprintable()


def _correlation_id(properties: Properties) -> str | None:
    text = properties.correlation_id
    return text if type(text) is str and is_key(text) else None


def _traceparent(properties: Properties) -> str | None:
    headers = properties.headers
    text = headers.get(TRACEPARENT) if type(headers) is dict else None
    return text if type(text) is str and _TRACEPARENT.fullmatch(text) else None
