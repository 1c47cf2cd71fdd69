"""Confirming or releasing a held email takes effect once, and is audited."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import psycopg
import pytest

from dispatcher.actions.batch import Batch
from dispatcher.actions.held import Confirm, Release
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.store.connections import AsyncSession, connect_async
from tests.ops.dead_emails import DeadEmails
from tests.ops.decisions import decide
from tests.waiting import until

CONFIRM = Confirm(reason="ann@example.org got it")
RELEASE = Release(reason="the provider never had it")
WAITING_HERE = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


async def test_a_confirmed_email_is_sent_counted_and_audited(session: AsyncSession, dead_emails: DeadEmails) -> None:
    ids = [*dead_emails.create(status="held"), *dead_emails.create(status="held", provider="ses")]

    assert await decide(session, CONFIRM, *ids) == ["confirmed", "confirmed"]

    row = dead_emails.books.row(ids[0])
    assert (row["status"], row["dead_letter_due_at"]) == ("sent", None)
    assert row["sent_at"] is not None
    assert dead_emails.books.hourly() == {"accepted": 2}
    acts = dead_emails.audit()
    assert {(act["actor"], act["action"], act["email_id"]) for act in acts} == {
        ("ann@ops-1", "confirm", email_id) for email_id in ids
    }
    assert acts[0]["reason"] == "<address> got it"


async def test_a_released_email_is_pending_and_due_with_all_attempts_again(
    session: AsyncSession, dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create(status="held", dead_letter_due_at="2026-01-01T00:00:00Z")

    assert await decide(session, RELEASE, email_id) == ["released"]

    row = dead_emails.books.row(email_id)
    assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 3, 3)
    assert (row["dead_letter_due_at"], row["published_at"]) == (None, None)
    assert row["publish_due_at"] is not None
    assert [act["action"] for act in dead_emails.audit()] == ["release"]


@pytest.mark.parametrize(
    ("columns", "verdicts"),
    [
        ({"status": "sent"}, ["already_sent", "already_sent"]),
        ({"status": "pending"}, ["under_way", "under_way"]),
        ({"status": "sending"}, ["under_way", "under_way"]),
        ({"status": "cancelled"}, ["cancelled", "cancelled"]),
        ({"status": "failed"}, ["failed", "failed"]),
        ({"status": "held", "expires_at": "2026-01-01T00:00:00Z"}, ["expired"]),
    ],
)
async def test_an_email_that_cannot_be_decided_is_not_changed(
    session: AsyncSession, dead_emails: DeadEmails, columns: dict[str, str], verdicts: list[str]
) -> None:
    (email_id,) = dead_emails.create(**columns)  # type: ignore[arg-type]
    before = dead_emails.books.row(email_id)

    found = [await decide(session, decision, email_id) for decision in (RELEASE, CONFIRM)[: len(verdicts)]]

    assert found == [[verdict] for verdict in verdicts]
    assert (dead_emails.books.row(email_id), dead_emails.audit()) == (before, [])


async def test_unknown_emails_other_tenants_and_deleted_content(session: AsyncSession, dead_emails: DeadEmails) -> None:
    pruned, other = dead_emails.create(2, status="held")
    dead_emails.books.connection.execute("delete from email_content where email_id = %s", [pruned])

    assert await decide(session, RELEASE.but(tenant_id="another"), other) == ["unknown"]
    assert await decide(session, RELEASE, uuid4(), pruned, other) == ["unknown", "content_pruned", "released"]
    assert await decide(session, CONFIRM, uuid4()) == ["unknown"]


async def test_of_a_concurrent_confirm_and_release_one_is_applied(tables_url: str, dead_emails: DeadEmails) -> None:
    email_ids = dead_emails.create(20, status="held")

    async def decide_all(decision: Batch) -> list[str]:
        async with await connect_async(tables_url, name="operator") as own:
            return [verdict for email_id in email_ids for verdict in await decide(own, decision, email_id)]

    confirmed, released = await asyncio.gather(decide_all(CONFIRM), decide_all(RELEASE))

    won = [(a == "confirmed", b == "released") for a, b in zip(confirmed, released, strict=True)]
    assert all(a != b for a, b in won)
    assert len(dead_emails.audit()) == 20


async def test_an_email_that_becomes_held_while_the_release_waits_for_its_row_is_released(
    session: AsyncSession, tables_url: str, dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create(status="sending")

    async with await connect_async(tables_url, name="worker") as worker, worker.transaction():
        await worker.execute("update dispatcher.email_log set status = 'held' where email_id = %s", [email_id])
        releasing = asyncio.create_task(decide(session, RELEASE, email_id))
        await until(lambda: dead_emails.books.select(WAITING_HERE))

    assert await releasing == ["released"]
    assert (dead_emails.books.row(email_id)["status"], len(dead_emails.audit())) == ("pending", 1)


def test_a_reason_is_required() -> None:
    with pytest.raises(DispatcherError, match="reason"):
        Act.of(None, "  ")


@pytest.mark.parametrize("statement", ["update operator_audit set reason = ''", "delete from operator_audit"])
async def test_audit_records_cannot_be_changed(session: AsyncSession, dead_emails: DeadEmails, statement: str) -> None:
    (email_id,) = dead_emails.create(status="held")
    await decide(session, CONFIRM, email_id)

    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        dead_emails.books.connection.execute(statement.encode())
