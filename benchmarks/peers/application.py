"""The code of an application that sends emails through a task queue: its tables, and how it leases and records emails.

The code runs in the peers' environments. As in most applications, a unique key prevents a second enqueue, and a lease,
which only one worker can have at a time, prevents a second sending.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg

SCHEMA: Final = """
create table email (
    email_id uuid primary key,
    message_key text not null,
    sender text not null,
    recipient text not null,
    subject text not null,
    body text not null,
    status text not null default 'pending',
    attempts integer not null default 0,
    lease_token bigint not null default 0,
    locked_until timestamptz not null default 'epoch',
    provider_message_id text,
    created_at timestamptz not null default clock_timestamp(),
    sent_at timestamptz
) with (fillfactor = 70);

create table email_idempotency (
    message_key text primary key,
    email_id uuid not null,
    created_at timestamptz not null default clock_timestamp(),
    completed_at timestamptz
) with (fillfactor = 80);
"""

CLAIM_KEY: Final = """
insert into email_idempotency (message_key, email_id)
values (%(message_key)s, %(email_id)s)
on conflict (message_key) do nothing
"""

INSERT: Final = """
insert into email (email_id, message_key, sender, recipient, subject, body)
values (%(email_id)s, %(message_key)s, %(sender)s, %(recipient)s, %(subject)s, %(body)s)
"""

LOAD: Final = """
select email_id, message_key, sender, recipient, subject, body, lease_token
from email
where email_id = %(email_id)s
"""

LEASE: Final = """
update email
set status = 'sending', attempts = attempts + 1, lease_token = lease_token + 1,
    locked_until = clock_timestamp() + make_interval(secs => %(seconds)s)
where email_id = %(email_id)s and status <> 'sent' and locked_until < clock_timestamp()
returning email_id, message_key, sender, recipient, subject, body, lease_token
"""
"""Leases an email and reads its content in one statement."""

LOOK: Final = """
select status, greatest(0, extract(epoch from locked_until - clock_timestamp()))::float8
from email
where email_id = %(email_id)s
"""

RECORD: Final = """
update email
set status = 'sent', sent_at = clock_timestamp(), provider_message_id = %(provider_message_id)s
where email_id = %(email_id)s and lease_token = %(lease_token)s
"""

COMPLETE: Final = """
update email_idempotency
set completed_at = clock_timestamp()
where message_key = %(message_key)s
"""

RECORD_AND_COMPLETE: Final = """
with recorded as (
    update email
    set status = 'sent', sent_at = clock_timestamp(), provider_message_id = %(provider_message_id)s
    where email_id = %(email_id)s and lease_token = %(lease_token)s
    returning message_key
)
update email_idempotency
set completed_at = clock_timestamp()
from recorded
where email_idempotency.message_key = recorded.message_key
"""
"""Records the email and completes its key in one statement, so that the commit takes no further round trip."""


class Busy(Exception):
    """Another worker has the lease, which expires after `seconds` if that worker has died."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"leased for another {seconds:.1f} s")
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings from the environment."""

    database_url: str
    amqp_url: str
    queue: str
    sendgrid_host: str
    ca_file: str
    lease_seconds: float


def settings() -> Settings:
    """Read the environment variables that `run.py` sets."""
    return Settings(
        database_url=os.environ["PEER_DATABASE_URL"],
        amqp_url=os.environ["PEER_AMQP_URL"],
        queue=os.environ["PEER_QUEUE"],
        sendgrid_host=os.environ["PEER_SENDGRID_HOST"],
        ca_file=os.environ["PEER_CA_FILE"],
        lease_seconds=float(os.environ["PEER_LEASE_SECONDS"]),
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """An email before it has an id."""

    message_key: str
    sender: str
    recipient: str
    subject: str
    body: str


@dataclass(frozen=True, slots=True)
class Email:
    """A leased email."""

    email_id: UUID
    message_key: str
    sender: str
    recipient: str
    subject: str
    body: str
    lease_token: int

    def as_sendgrid(self) -> dict[str, Any]:
        """The document for SendGrid's API."""
        return {
            "personalizations": [{"to": [{"email": self.recipient}]}],
            "from": {"email": self.sender},
            "subject": self.subject,
            "content": [{"type": "text/plain", "value": self.body}],
            "custom_args": {"email_id": str(self.email_id)},
        }


def drafts(emails: int) -> Iterator[Draft]:
    """Yields the same emails that the measurements of `dispatcher run` send."""
    body = "Thank you for your order. It leaves our house tomorrow.\n" * 8
    for number in range(emails):
        yield Draft(
            f"receipt-{number}", "shop@example.com", f"customer{number}@example.org", f"Your receipt {number}", body
        )


def insert(connection: psycopg.Connection[Any], draft: Draft) -> UUID | None:
    """Insert a row for the email and a row for its key; returns None if the key already exists. The caller commits."""
    email_id = uuid4()
    values = {
        "email_id": email_id,
        "message_key": draft.message_key,
        "sender": draft.sender,
        "recipient": draft.recipient,
        "subject": draft.subject,
        "body": draft.body,
    }
    if not connection.execute(CLAIM_KEY, values).rowcount:
        return None
    connection.execute(INSERT, values)
    return email_id


def lease(connection: psycopg.Connection[Any], email_id: str, seconds: float) -> Email | None:
    """Lease the email for this time; None if the email was sent. Commits only if the connection is in autocommit mode.

    Raises:
        Busy: Another worker has the lease.
    """
    row = connection.execute(LEASE, {"email_id": email_id, "seconds": seconds}).fetchone()
    if row is not None:
        return Email(*row)
    looked = connection.execute(LOOK, {"email_id": email_id}).fetchone()
    if looked is None or looked[0] == "sent":
        return None
    raise Busy(looked[1])


def record(connection: psycopg.Connection[Any], email: Email, provider_message_id: str) -> None:
    """Record in one statement that the email was sent and that its key is complete."""
    connection.execute(RECORD_AND_COMPLETE, recorded(email, provider_message_id))


def recorded(email: Email, provider_message_id: str) -> dict[str, object]:
    """The parameters of the recording statements."""
    return {
        "email_id": email.email_id,
        "message_key": email.message_key,
        "lease_token": email.lease_token,
        "provider_message_id": provider_message_id,
    }
