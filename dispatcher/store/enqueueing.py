"""Builds the parameters of the enqueue statements, and reads the results of these statements.

This module executes nothing. `producers` executes the statements on the application's connection, synchronous or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from dispatcher.domain.email_id import new_email_ids
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import EMAIL_CHANNEL, TEST_CHANNEL, file_parts
from dispatcher.store.address_hashes import normalised
from dispatcher.store.arrays import array_literal
from dispatcher.store.comparable_address import comparable_address

# The form of a traceparent: version, trace id, parent id, flags (W3C Trace Context, section 3.2).
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)

_COLUMNS: Final = (
    *("email_id", "tenant_id", "message_key", "payload_hash", "on_uncertain", "correlation_id", "traceparent"),
    *("sender", "recipients", "subject", "text_body", "html_body", "template_id", "template_data", "headers", "tags"),
    "metadata",
    *("attachment_count", "octets", "ignore_suppression", "send_at", "expires_at", "channel", "lane", "topic"),
    *("sender_address", "sender_domain"),
)
_BINARY: Final = frozenset({"email_id", "payload_hash", "text_body", "html_body"})
"""The columns that a batch sends in binary. The others contain short texts, which PostgreSQL reads as fast."""

Parameters = dict[str, Any]
Key = tuple[str, str]
Holders = dict[Key, tuple[UUID, bytes | None]]
"""For each key that exists, the id of its email, and the hash of the drafts with the same payload (None: no draft)."""


class Draft(NamedTuple):
    """An email to insert, with the id that the email gets if its key is new."""

    email_id: UUID
    email: Message
    payload_hash: bytes  # compared with the stored email's hash if the key already exists
    traceparent: str | None
    lane: str | None = None  # of the email or its API key; None: by the lane rule for the sender, else `normal`
    is_test: bool = False  # of a test key: the email never leaves

    @property
    def key(self) -> Key:
        return (self.email.tenant_id, self.email.message_key)


def draft(
    emails: Sequence[Message], traceparent: str | None = None, lane: str | None = None, *, is_test: bool = False
) -> list[Draft]:
    """Creates drafts in the given order. `lane`: the lane of emails that do not set one. `is_test`: of a test key. Such
    an email has another hash, so that a real email with its message key is a conflict, and not taken for a repetition.

    Ignores an invalid traceparent (W3C Trace Context, section 2.3): it becomes a message header, and RabbitMQ would
    refuse a message with a header that is too long.
    """
    if traceparent is not None and not _TRACEPARENT.fullmatch(traceparent):
        traceparent = None
    ids = new_email_ids(len(emails))
    hashes = [email.payload_hash() for email in emails]
    if is_test:
        hashes = [sha256(b"test" + each).digest() for each in hashes]
    return [
        Draft(new_id, email, payload_hash, traceparent, email.lane or lane, is_test)
        for new_id, email, payload_hash in zip(ids, emails, hashes, strict=True)
    ]


def insert_parameters(
    drafts: Sequence[Draft],
    *,
    publish_in_seconds: float = 0.0,
    direct_lanes: Sequence[str] = (),
    relay_tenants: Sequence[str] = (),
) -> Parameters:
    """The parameters of the statement `enqueue` for several drafts, in the order of their keys, or of `enqueue_one`.

    The caller publishes the emails of `direct_lanes`, and marks them as published. The relay publishes those that are
    not marked after `publish_in_seconds`, and all emails of `relay_tenants`: these tenants are paused or have a
    ceiling.
    """
    ordered = sorted(drafts, key=lambda item: item.key) if len(drafts) > 1 else drafts
    rows = [_row(item) for item in ordered]
    recipients = [list(map(normalised, item.email.to + item.email.cc + item.email.bcc)) for item in ordered]
    if len(rows) == 1:
        parameters = dict(zip(_COLUMNS, rows[0], strict=True))
    else:
        columns = map(list, zip(*rows, strict=True))
        parameters = {name: _column(name, values) for name, values in zip(_COLUMNS, columns, strict=True)}
        numbers = [str(number) for number, addresses in enumerate(recipients, 1) for _ in addresses]
        parameters["email_numbers"] = array_literal(numbers)
    # PostgreSQL hashes the addresses, because applications have no right to read the secret key for the hashes.
    parameters["addresses"] = array_literal(list(chain.from_iterable(recipients)))
    parameters["publish_in_seconds"] = publish_in_seconds
    parameters["direct_lanes"] = array_literal(direct_lanes)
    parameters["relay_tenants"] = array_literal(relay_tenants)
    return parameters


def _row(item: Draft) -> tuple[Any, ...]:
    """The values of a draft, in the order of `_COLUMNS`. A value that may be absent, or is a number, is a text: psycopg
    prepares a statement anew for each combination of types, and a text has the type of None."""
    email = item.email
    address = comparable_address(email.sender) if email.channel == EMAIL_CHANNEL else email.sender
    return (
        item.email_id,
        email.tenant_id,
        email.message_key,
        item.payload_hash,
        email.on_uncertain and email.on_uncertain.value,
        email.correlation_id,
        item.traceparent,
        email.sender,
        _json(_recipients(email)),
        email.subject,
        email.text,
        email.html,
        email.template_id,
        _json(email.template_data),
        _json(email.headers),
        _json(email.stored_tags),
        _json(email.metadata),
        str(len(file_parts(email))) if has_file_parts(email) else "0",
        str(octets_of(email)),
        str(email.ignore_suppression),
        email.send_at and email.send_at.isoformat(),
        email.expires_at and email.expires_at.isoformat(),
        TEST_CHANNEL if item.is_test else None if email.channel == EMAIL_CHANNEL else email.channel,
        item.lane,
        email.topic,
        address,
        address[address.rindex("@") :] if "@" in address else None,
    )


def octets_of(email: Message) -> int:
    """The approximate size of the content: each character of a non-ASCII text counts as four octets."""
    octets = sum([len(file.content) for file in file_parts(email)]) if has_file_parts(email) else 0
    for text in (email.text, email.html, email.template_data and _json(email.template_data)):
        if text:
            octets += len(text) if text.isascii() else 4 * len(text)
    return octets


def has_file_parts(email: Message) -> bool:
    """Whether two statements in one transaction must store the email: it has attachments, or what is stored so."""
    return bool(email.attachments or email.calendar or email.raw)


def has_attachments(drafts: Iterable[Draft]) -> bool:
    """Whether two statements in one transaction must store the drafts."""
    return any(has_file_parts(item.email) for item in drafts)


def attachment_parameters(drafts: Iterable[Draft], inserted: set[UUID]) -> Parameters | None:
    """The parameters of the statement `enqueue_attachments` for the inserted emails; None if no inserted email has an
    attachment."""
    rows = [
        (item.email_id, position, *file)
        for item in drafts
        if has_file_parts(item.email) and item.email_id in inserted
        for position, file in enumerate(file_parts(item.email))
    ]
    names = ("email_ids", "positions", "filenames", "content_types", "contents", "content_ids", "parts")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else None


def key_parameters(drafts: Iterable[Draft], inserted: set[UUID]) -> Parameters | None:
    """The parameters of the statement `find_by_key` for the emails whose key already existed; None if every key was
    new."""
    keys = sorted({(*item.key, item.payload_hash) for item in drafts if item.email_id not in inserted})
    if not keys:
        return None
    tenants, message_keys, payload_hashes = map(list, zip(*keys, strict=True))
    return {"tenant_ids": tenants, "message_keys": message_keys, "payload_hashes": payload_hashes}


def holders(rows: Iterable[Sequence[Any]]) -> Holders:
    return {(tenant, key): (email_id, found and bytes(found)) for tenant, key, email_id, found in rows}


def _recipients(email: Message) -> dict[str, tuple[str, ...]]:
    if not (email.cc or email.bcc or email.reply_to):
        return {"to": email.to}
    lists = {"to": email.to, "cc": email.cc, "bcc": email.bcc, "reply_to": email.reply_to}
    return {name: addresses for name, addresses in lists.items() if addresses}


def _column(name: str, values: list[Any]) -> list[Any] | str | None:
    """The values of a column as psycopg sends them fastest; None if all are None, because `unnest` then adds nulls."""
    if values.count(None) == len(values):
        return None
    return values if name in _BINARY else array_literal(values)


def _json(value: Any) -> str | None:
    return orjson.dumps(value, default=dict).decode() if value else None  # an immutable mapping becomes a dict
