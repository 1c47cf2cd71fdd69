"""The body of a dead letter. With this body, an operator can understand the failure and replay the email. The body
contains nothing private.

Only dead letters of failed and held emails have such a body. If a message cannot be decoded, RabbitMQ moves it to the
DLQ with its original body.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import orjson

from dispatcher.broker.pointer import VERSION, decode_fields, email_id, message_key
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.outgoing import EMAIL_CHANNEL
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidPointer

MAX_ERROR_CHARACTERS: Final = 4000
"""A longer text, such as an error, is truncated: every dead letter must be far shorter than `pointer.MAX_BODY_OCTETS`,
and RabbitMQ closes the connection of a message that is too long. The email's row has the full text."""

MAX_ATTEMPT_COUNT: Final = 2**31 - 1
"""The largest number of attempts that fits into the database column."""


def encode(dead_letter: DeadLetter) -> bytes:
    """The message's body. Times are in RFC 3339 format."""
    values = [getattr(dead_letter, name) for name in DeadLetter.__slots__]
    clipped = [value[:MAX_ERROR_CHARACTERS] if isinstance(value, str) else value for value in values]
    fields = dict(zip(DeadLetter.__slots__, clipped, strict=True))
    if dead_letter.channel == EMAIL_CHANNEL:
        del fields["channel"]
    return orjson.dumps({"v": VERSION, **fields})


def decode(body: bytes) -> DeadLetter:
    """The dead letter in a message. Raises InvalidPointer, which quotes nothing from the message."""
    fields = decode_fields(body)
    status, attempts = fields.get("status"), fields.get("attempts")
    if status not in (Status.FAILED, Status.HELD):
        raise InvalidPointer('"status" must be failed or held.')
    if type(attempts) is not int or not 0 <= attempts <= MAX_ATTEMPT_COUNT:
        raise InvalidPointer(f'"attempts" is missing or is not a whole number from 0 to {MAX_ATTEMPT_COUNT}.')
    return DeadLetter(
        email_id=email_id(fields),
        tenant_id=_text(fields, "tenant_id"),
        message_key=message_key(fields),
        correlation_id=_optional_text(fields, "correlation_id"),
        status=Status(status),
        error_type=_optional_text(fields, "error_type"),
        error=_optional_text(fields, "error"),
        attempts=attempts,
        provider=_optional_text(fields, "provider"),
        created_at=_instant(fields, "created_at"),
        failed_at=_instant(fields, "failed_at"),
        channel=_optional_text(fields, "channel") or EMAIL_CHANNEL,
    )


def _optional_text(fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields.get(name) is None else _text(fields, name)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if type(value) is not str:
        raise InvalidPointer(f'"{name}" is missing or is not a string.')
    return value


def _instant(fields: Mapping[str, Any], name: str) -> datetime:
    try:
        instant = datetime.fromisoformat(_text(fields, name))
    except ValueError:
        raise InvalidPointer(f'"{name}" is not a time in RFC 3339 format.') from None
    if instant.tzinfo is None:
        raise InvalidPointer(f'"{name}" has no time zone.')
    return instant
