"""Suppresses recipients directly in the tables."""

from __future__ import annotations

import psycopg

from dispatcher.domain.suppression import Recipient
from dispatcher.store.address_hashes import AddressHasher, hash_with_topic
from dispatcher.store.suppressions import hash_of


def hasher_of(connection: psycopg.Connection) -> AddressHasher:
    row = connection.execute("select address_key from dispatcher_database").fetchone()
    assert row is not None
    return AddressHasher(bytes(row[0]))


def suppress(
    connection: psycopg.Connection,
    *texts: str,
    tenant_id: str = "default",
    expires_in: str | None = None,
    topic: str | None = None,
) -> None:
    """Adds an entry for each address or domain. It expires in an interval, such as `1 day` or `-1 day`, or never."""
    hasher = hasher_of(connection)
    for each in map(Recipient.parse, texts):
        hashed, of_topic = hash_of(each, hasher), None
        if topic is not None:
            hashed, of_topic = hash_with_topic(hashed, topic), hashed
        connection.execute(
            "insert into suppression (tenant_id, address_hash, is_domain, masked, reason, expires_at, topic, "
            "recipient_hash) values (%s, %s, %s, %s, 'hard_bounce', now() + %s::interval, %s, %s)",
            [tenant_id, hashed, each.is_domain, each.masked, expires_in, topic, of_topic],
        )


def unsuppress(connection: psycopg.Connection, text: str) -> None:
    address_hash = hash_of(Recipient.parse(text), hasher_of(connection))
    connection.execute("delete from suppression where address_hash = %s", [address_hash])
