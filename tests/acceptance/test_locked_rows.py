"""An open transaction locks one email's row, as a forgotten `psql` session does. All other emails are sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import psycopg

from tests.acceptance.harness import Host, emails, stop
from tests.supervisor.program import eventually

MAX_COPIES = 3
"""The maximum number of deliveries of one message: one before the worker finds the lock,
one after the lock is released, and one to spare."""


@contextmanager
def held(host: Host, email_id: UUID) -> Iterator[None]:
    """Locks this email's row by a transaction that stays open during the block."""
    with psycopg.connect(host.database_url, application_name="somebody's psql") as connection:
        connection.execute("select from email_log where email_id = %s for update", (email_id,))
        yield
        connection.rollback()


def sent(host: Host) -> set[UUID]:
    """The emails that are recorded as sent."""
    return {email_id for email_id, row in host.rows().items() if row.status == "sent"}


def test_a_locked_email_delays_no_other(host: Host) -> None:
    (locked,) = host.enqueue(emails(1, name="locked"))
    others = host.enqueue(emails(300))

    with held(host, locked):
        run = host.run(LOG_LEVEL="DEBUG")
        eventually(lambda: sent(host) == others, "the delivery of all emails without a lock")
        event = run.await_events("email.locked")
    books = host.await_finished({locked, *others})

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 301}
    assert sum(event["count"] for event in run.events("relay.published")) <= 300 + MAX_COPIES
    assert (event["count"], event["email_ids"]) == (1, [str(locked)])
    assert "somebody's psql" in event["lock_holders"][0]
    assert len(run.events("relay.leading")) == 1
    assert not run.events("store.connection_lost")


def test_an_email_locked_while_on_the_wire_is_recorded_when_the_lock_ends(host: Host) -> None:
    host.sink("--latency-ms", "4000")  # slow, so that the test can lock the row before the answer arrives
    (locked,) = host.enqueue(emails(1, name="locked"))
    run = host.run(WORKERS=1, PREFETCH=64, SMTP_CONNECTIONS=40)
    eventually(lambda: host.rows()[locked].status == "sending", "the lease of the email to lock")

    with held(host, locked):
        others = host.enqueue(emails(40))
        run.await_events("email.locked")
        eventually(lambda: sent(host) == others, "the delivery of all emails without a lock")
        assert host.recipient.delivered()[locked] == 1
        assert not host.rabbit.waiting(host.topology.queue)
    books = host.await_finished({locked, *others})

    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 41}
    assert not run.events("email.lease_lost")
    assert not run.events("store.connection_lost")
