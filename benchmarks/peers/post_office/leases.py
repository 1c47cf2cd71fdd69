"""Adds a lease to django-post_office, as an application can, so that only one worker sends each email.

The first lease of an email inserts a row for the email. The outcome is later recorded in this row.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

from benchmarks.peers.application import Busy

SCHEMA: Final = """
create table email_lease (
    email_id uuid primary key,
    attempts integer not null,
    lease_token bigint not null,
    locked_until timestamptz not null,
    provider_message_id text,
    completed_at timestamptz
) with (fillfactor = 70);
"""

LEASE: Final = """
insert into email_lease as l (email_id, attempts, lease_token, locked_until)
values (%(email_id)s, 1, 1, clock_timestamp() + make_interval(secs => %(seconds)s))
on conflict (email_id) do update
set attempts = l.attempts + 1, lease_token = l.lease_token + 1, locked_until = excluded.locked_until
where l.completed_at is null and l.locked_until < clock_timestamp()
returning lease_token
"""

LOOK: Final = """
select completed_at is not null, greatest(0, extract(epoch from locked_until - clock_timestamp()))::float8
from email_lease
where email_id = %(email_id)s
"""

RECORD: Final = """
update email_lease
set completed_at = clock_timestamp(), provider_message_id = %(provider_message_id)s
where email_id = %(email_id)s and lease_token = %(lease_token)s
"""

SENT: Final = "select count(completed_at), extract(epoch from max(completed_at))::float8 from email_lease"


def lease(connection: psycopg.Connection[Any], email_id: str, seconds: float) -> int | None:
    """Lease the email for this time; return the token, or None if the email was sent.

    Commits only if the connection is in autocommit mode.

    Raises:
        Busy: Another worker has the lease.
    """
    row = connection.execute(LEASE, {"email_id": email_id, "seconds": seconds}).fetchone()
    if row is not None:
        return int(row[0])
    looked = connection.execute(LOOK, {"email_id": email_id}).fetchone()
    assert looked is not None
    is_sent, seconds_left = looked
    if is_sent:
        return None
    raise Busy(seconds_left)


def record(connection: psycopg.Connection[Any], email_id: str, lease_token: int, provider_message_id: str) -> None:
    """Record that the email was sent. Does nothing if another worker has leased the email since."""
    values = {"email_id": email_id, "lease_token": lease_token, "provider_message_id": provider_message_id}
    connection.execute(RECORD, values)
