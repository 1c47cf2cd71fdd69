"""Tests the reason why an email waits, with PostgreSQL's real data about workers, relays, providers, locks and
leases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest

from dispatcher.domain.waiting import WaitExplanation, WaitReason
from dispatcher.ops.email_history import find_history
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession
from dispatcher.store.queries import query
from tests.store.books import Books
from tests.waiting import until_answer

WORKER = "host-a:w0:4711:9f86d081"
LEASE_SECONDS = 60.0


@pytest.fixture
def running(tables_url: str) -> Iterator[ExitStack]:
    """Opens the sessions of a leading relay and of a worker."""
    with ExitStack() as opened:
        opened.enter_context(psycopg.connect(tables_url, autocommit=True, application_name=WORKER))
        relay = opened.enter_context(psycopg.connect(tables_url, autocommit=True))
        relay.execute(query("take_named_locks"), {"names": ["relay"]})
        yield opened


@contextmanager
def lock_holder(url: str, email_id: UUID) -> Iterator[None]:
    """Opens a transaction that locks the email's row."""
    with psycopg.connect(url, application_name="left-open") as connection:
        connection.execute("select from email_log where email_id = %s for share", [email_id])
        yield
        connection.rollback()


async def wait_of(session: AsyncSession, email_id: UUID) -> WaitExplanation:
    story = await find_history(session, email_id, lease_seconds=LEASE_SECONDS)
    assert story is not None
    assert story.waiting is not None
    return story.waiting


async def test_without_dispatcher_run_a_relay_is_missing_and_then_a_worker(
    session: AsyncSession, books: Books, tables_url: str
) -> None:
    (email_id,) = books.enqueue(1)

    assert (await wait_of(session, email_id)).reason is WaitReason.NO_RELAY
    books.change(email_id, publish_due_at=None)
    assert (await wait_of(session, email_id)).reason is WaitReason.NO_WORKER


@pytest.mark.parametrize(
    ("wait_reason", "reason", "because"),
    [
        ("scheduled", WaitReason.SCHEDULED, "it is scheduled"),
        ("redelivery", WaitReason.REDELIVERY, "ses deferred it (attempt 7: recipient_deferred)"),
    ],
)
async def test_a_waiting_email_waits_until_its_time(
    session: AsyncSession, books: Books, wait_reason: str, reason: WaitReason, because: str
) -> None:
    (email_id,) = books.enqueue(1)
    until = datetime.now(UTC) + timedelta(hours=1)
    attempt = {"attempt_count": 7, "provider": "ses", "error_type": "recipient_deferred"}
    wait = {"status": "waiting", "wait_until": until, "wait_reason": wait_reason, "publish_due_at": None}
    books.change(email_id, **wait, **attempt)

    found = await wait_of(session, email_id)

    assert (found.reason, found.until, found.because) == (reason, until, because)


@pytest.mark.parametrize(
    ("limit", "because"),
    [
        ((5, None), "example.org may get 5 emails per second"),
        ((1, 2), "example.org may get 1 email per second, 2 at the same time"),
        ((None, 1), "example.org may get 1 email at the same time"),
        (None, "example.org had a ceiling, which was removed"),
    ],
)
async def test_an_email_waits_for_the_ceiling_of_its_domain(
    session: AsyncSession, books: Books, limit: tuple[float | None, int | None] | None, because: str
) -> None:
    (email_id,) = books.enqueue(1)
    if limit:
        books.connection.execute(
            "insert into domain_limit (domain, per_second, concurrent) values ('example.org', %s, %s)", limit
        )
    until = datetime.now(UTC) + timedelta(hours=1)
    place = {"status": "waiting", "wait_until": until, "wait_reason": "domain", "wait_domain": "example.org"}
    books.change(email_id, **place, publish_due_at=None)

    found = await wait_of(session, email_id)

    assert (found.reason, found.until, found.because) == (WaitReason.DOMAIN, until, because)


async def test_emails_ahead_are_other_due_emails(session: AsyncSession, books: Books, running: ExitStack) -> None:
    *others, last = books.enqueue(5)
    books.change(others[0], status="sent", publish_due_at=None)
    books.change(others[1], publish_due_at=datetime.now(UTC) + timedelta(hours=1))

    found = await wait_of(session, last)

    assert (found.reason, found.ahead) == (WaitReason.QUEUED, 2)


async def test_a_provider_that_refuses_the_credentials_is_named_with_its_reason(
    session: AsyncSession, books: Books, running: ExitStack
) -> None:
    (email_id,) = books.enqueue(1)
    books.connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at) "
        "values ('smtp', 'host-a:w0', 'open', 'SMTP refuses our credentials.', now() + interval '30 s')"
    )

    found = await wait_of(session, email_id)

    assert found.reason is WaitReason.PROVIDER_REFUSES
    assert found.detail == (
        "smtp refuses all emails: SMTP refuses our credentials. To try it at once: `dispatcher resume provider smtp`."
    )
    assert found.until is not None


async def test_a_leased_email_waits_for_its_worker_and_then_for_a_relay(
    session: AsyncSession, books: Books, running: ExitStack
) -> None:
    (email_id,) = books.enqueue(1)
    lease = "update email_log set status = 'sending', locked_by = %s, locked_until = now() + interval '1 min'"
    books.connection.execute(lease, [WORKER])
    leased = await wait_of(session, email_id)
    running.close()

    async def is_gone() -> bool:
        return (await wait_of(session, email_id)).reason is WaitReason.WORKER_LOST

    assert leased.reason is WaitReason.LEASED
    await until_answer(is_gone)  # PostgreSQL notices a closed session a moment later


@pytest.mark.slow
async def test_an_open_transaction_that_has_locked_the_row_is_named(
    session: AsyncSession, books: Books, running: ExitStack, tables_url: str
) -> None:
    (email_id,) = books.enqueue(1)

    async def is_named() -> bool:
        found = await wait_of(session, email_id)
        return found.reason is WaitReason.LOCKED and "(left-open), idle in transaction" in found.detail

    with lock_holder(tables_url, email_id):
        await until_answer(is_named, BATCH_LOCK_SECONDS + 20)


async def test_a_finished_email_waits_for_nothing(session: AsyncSession, books: Books) -> None:
    (email_id,) = books.enqueue(1)
    books.change(email_id, status="sent", publish_due_at=None)

    story = await find_history(session, email_id)

    assert story is not None
    assert story.waiting is None
