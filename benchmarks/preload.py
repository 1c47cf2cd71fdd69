"""Fills the tables with finished emails before a run, to show the effect of a large history."""

from __future__ import annotations

from typing import Final

from dispatcher.store.connections import connected

BATCH: Final = 50_000
_TABLES: Final = (
    b"dispatcher.email_log, dispatcher.email_content, dispatcher.email_idempotency, dispatcher.email_attempt"
)

_INSERT: Final = """
with numbers as (
    select
        n,
        -- A UUIDv7 (RFC 9562, section 5.7). The instants are evenly spread over the last six days, and ascend as in
        -- production: in a random order, each row would touch a different page of every index.
        (
            lpad(to_hex((1000 * extract(epoch from now() - (1 - n / %(emails)s::float8) * interval '6 days'))::bigint),
                12, '0')
            || '7' || substr(md5(random()::text), 1, 3)
            || 'a' || substr(md5(random()::text), 1, 15)
        )::uuid as email_id
    from generate_series(%(first)s::bigint, %(last)s::bigint) as n
),
logged as (
    insert into dispatcher.email_log (
        email_id, tenant_id, message_key, status, attempt_count, lease_token, provider, provider_message_id,
        created_at, published_at, sent_at
    )
    select
        email_id, 'default', 'preloaded-' || n, 'sent', 1, 1, 'capture', email_id::text,
        now() - interval '1 day', now() - interval '1 day', now() - interval '1 day'
    from numbers
),
stored as (
    insert into dispatcher.email_content (email_id, sender, recipients, subject, text_body)
    select
        email_id, 'Shop <shop@example.com>',
        jsonb_build_object('to', jsonb_build_array('customer' || n || '@example.org')),
        'Your receipt ' || n, repeat('Thank you for your order. It leaves our house tomorrow.' || chr(10), 8)
    from numbers
),
claimed as (
    insert into dispatcher.email_idempotency (tenant_id, message_key, email_id, payload_hash, completed_at)
    select 'default', 'preloaded-' || n, email_id, decode(md5(n::text) || md5(n::text), 'hex'), now()
    from numbers
)
insert into dispatcher.email_attempt (email_id, attempt_number, worker, provider, started_at, finished_at, outcome)
select email_id, 1, 'preloaded', 'capture', now() - interval '1 day', now() - interval '1 day', 'accepted'
from numbers
"""


def preload(database_url: str, emails: int) -> None:
    """Insert this many emails that were sent in the last six days; vacuum and analyze the tables."""
    with connected(database_url) as connection:
        connection.execute("set statement_timeout = 0")
        connection.execute("select dispatcher.email_partitions_make(now() - interval '6 days', 1)")
        for first in range(1, emails + 1, BATCH):
            connection.execute(_INSERT, {"first": first, "last": min(emails, first + BATCH - 1), "emails": emails})
            # The new rows are still in shared buffers. A single vacuum at the end would write every page a second time.
            connection.execute(b"vacuum " + _TABLES)
        connection.execute(b"analyze " + _TABLES)
        connection.execute("checkpoint")


def suppress(database_url: str, addresses: int) -> None:
    """Suppress this many addresses. The measured emails go to other addresses."""
    with connected(database_url) as connection:
        connection.execute(
            "insert into dispatcher.suppression (tenant_id, address_hash, is_domain, masked, reason) "
            "select 'default', decode(md5(n::text), 'hex'), false, 'x•••@example.org', 'hard_bounce' "
            "from generate_series(1, %s) as n",
            [addresses],
        )
        connection.execute("vacuum analyze dispatcher.suppression")
