"""Builds the parameters of the enqueue statements, and reads the results of these statements.

This module executes nothing. `producers` executes the statements on the application's connection, synchronous or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import orjson

from dispatcher.domain.email_id import new_email_ids
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import EMAIL_CHANNEL
from dispatcher.store.address_hashes import normalised
from dispatcher.store.comparable_address import comparable_address

# The form of a traceparent: version, trace id, parent id, flags (W3C Trace Context, section 3.2).
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)

Parameters = dict[str, Any]
Key = tuple[str, str]
Holders = dict[Key, tuple[UUID, bytes | None]]
"""For each key that exists, the id of its email, and the hash of the drafts with the same payload (None: no draft)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An email to insert, with the id that the email gets if its key is new.

    Attributes:
        payload_hash: The hash of the content. If the key already exists, PostgreSQL compares this hash with the stored
            email's hash.
        lane: The lane that the email or its API key sets. If None, an operator's lane rule for the sender decides;
            without such a rule, the lane is `normal`.
    """

    email_id: UUID
    email: Message
    payload_hash: bytes
    traceparent: str | None
    lane: str | None = None

    @property
    def key(self) -> Key:
        """The tenant and the message key. Together, they are unique."""
        return (self.email.tenant_id, self.email.message_key)


def draft(emails: Sequence[Message], traceparent: str | None = None, lane: str | None = None) -> list[Draft]:
    """Creates drafts in the given order. Ignores an invalid traceparent (W3C Trace Context, section 2.3).

    The traceparent becomes a message header. RabbitMQ would refuse a message with a header that is too long.

    Args:
        lane: The lane of emails that do not set a lane.
    """
    if traceparent is not None and not _TRACEPARENT.fullmatch(traceparent):
        traceparent = None
    ids = new_email_ids(len(emails))
    return [
        Draft(new_id, email, email.payload_hash(), traceparent, email.lane or lane)
        for new_id, email in zip(ids, emails, strict=True)
    ]


def insert_parameters(
    drafts: Sequence[Draft],
    *,
    publish_in_seconds: float = 0.0,
    direct_lanes: Sequence[str] = (),
    relay_tenants: Sequence[str] = (),
) -> Parameters:
    """The parameters of the statement `enqueue`, with the drafts in the order of their keys.

    Args:
        publish_in_seconds: How long the caller has to publish the emails of `direct_lanes`, and to mark them as
            published. After this time, the relay publishes those that are not marked.
        direct_lanes: The lanes whose emails the caller publishes.
        relay_tenants: The tenants that are paused or have a ceiling. The relay publishes all their emails.
    """
    ordered = sorted(drafts, key=lambda item: item.key)
    emails = [item.email for item in ordered]
    addresses = [_comparable_sender(email) for email in emails]
    template_datas = [_json(dict(email.template_data)) for email in emails]
    return {
        "email_ids": [item.email_id for item in ordered],
        "tenant_ids": [email.tenant_id for email in emails],
        "message_keys": [email.message_key for email in emails],
        "payload_hashes": [item.payload_hash for item in ordered],
        "on_uncertains": [email.on_uncertain.value if email.on_uncertain else None for email in emails],
        "correlation_ids": [email.correlation_id for email in emails],
        "traceparents": [item.traceparent for item in ordered],
        "senders": [email.sender for email in emails],
        "recipients": [_json(_recipients(email)) for email in emails],
        "subjects": [email.subject for email in emails],
        "text_bodies": [email.text for email in emails],
        "html_bodies": [email.html for email in emails],
        "template_ids": [email.template_id for email in emails],
        "template_datas": template_datas,
        "headers": [_json(dict(email.headers)) for email in emails],
        "tags": [_json(email.stored_tags) for email in emails],
        "attachment_counts": _array(len(email.attachments) for email in emails),
        "octets": list(map(_octets, emails, template_datas)),
        "ignore_suppressions": _array(email.ignore_suppression for email in emails),
        # Instants are sent as texts, because psycopg cannot send a list of only None values as an array of instants.
        "send_ats": [email.send_at and email.send_at.isoformat() for email in emails],
        "expires_ats": [email.expires_at and email.expires_at.isoformat() for email in emails],
        "channels": [None if email.channel == EMAIL_CHANNEL else email.channel for email in emails],
        "lanes": [item.lane for item in ordered],
        "sender_addresses": addresses,
        "sender_domains": [address[address.rindex("@") :] if "@" in address else None for address in addresses],
        **_recipient_parameters(ordered),
        "publish_in_seconds": publish_in_seconds,
        "direct_lanes": list(direct_lanes),
        "relay_tenants": list(relay_tenants),
    }


def has_attachments(drafts: Iterable[Draft]) -> bool:
    """Whether at least one draft has attachments. If so, two statements in one transaction must store the drafts."""
    return any(item.email.attachments for item in drafts)


def attachment_parameters(drafts: Iterable[Draft], inserted: set[UUID]) -> Parameters | None:
    """The parameters of the statement `enqueue_attachments` for the inserted emails; None if no inserted email has an
    attachment."""
    rows = [
        (item.email_id, position, attachment)
        for item in drafts
        if item.email_id in inserted
        for position, attachment in enumerate(item.email.attachments)
    ]
    if not rows:
        return None
    return {
        "email_ids": [email_id for email_id, _, _ in rows],
        "positions": [position for _, position, _ in rows],
        "filenames": [attachment.filename for _, _, attachment in rows],
        "content_types": [attachment.content_type for _, _, attachment in rows],
        "contents": [attachment.content for _, _, attachment in rows],
    }


def key_parameters(drafts: Iterable[Draft], inserted: set[UUID]) -> Parameters | None:
    """The parameters of the statement `find_by_key` for the emails whose key already existed; None if every key was
    new."""
    keys = sorted({(*item.key, item.payload_hash) for item in drafts if item.email_id not in inserted})
    if not keys:
        return None
    tenants, message_keys, payload_hashes = map(list, zip(*keys, strict=True))
    return {"tenant_ids": tenants, "message_keys": message_keys, "payload_hashes": payload_hashes}


def holders(rows: Iterable[Sequence[Any]]) -> Holders:
    """Converts the rows of `find_by_key`."""
    return {(tenant, key): (email_id, found and bytes(found)) for tenant, key, email_id, found in rows}


def _recipients(email: Message) -> dict[str, tuple[str, ...]]:
    lists = {"to": email.to, "cc": email.cc, "bcc": email.bcc, "reply_to": email.reply_to}
    return {name: addresses for name, addresses in lists.items() if addresses}


def _comparable_sender(email: Message) -> str:
    """The sender in the form in which lane rules store senders."""
    return comparable_address(email.sender) if email.channel == EMAIL_CHANNEL else email.sender


def _recipient_parameters(drafts: Iterable[Draft]) -> Parameters:
    """The recipients' addresses, each with the position of its email in `drafts`, from 1.

    PostgreSQL hashes the addresses, because applications have no right to read the secret key for the hashes.
    """
    numbers: list[int] = []
    addresses: list[str] = []
    for number, item in enumerate(drafts, 1):
        email = item.email
        for address in email.to + email.cc + email.bcc:
            addresses.append(normalised(address))
            numbers.append(number)
    return {"email_numbers": _array(numbers), "addresses": addresses}


def _array(values: Iterable[int]) -> str:
    """An array literal of integers or booleans. To convert a list, psycopg takes several times as long."""
    return f"{{{','.join(map(str, values))}}}"


def _octets(email: Message, template_data: str | None) -> int:
    """The approximate size of the content: each character of a non-ASCII text counts as four octets."""
    texts = [text for text in (email.text, email.html, template_data) if text]
    octets = sum(len(text) if text.isascii() else 4 * len(text) for text in texts)
    return octets + sum(len(attachment.content) for attachment in email.attachments)


def _json(value: Any) -> str | None:
    return orjson.dumps(value).decode() if value else None
