"""Confirming or releasing a held email takes effect once, is audited, and removes the dead letter."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import psycopg
import pytest

from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.ops.dead_letters import sweep
from dispatcher.ops.verdicts import Verdict, confirm, release
from dispatcher.store.connections import AsyncSession, connect_async
from tests.ops.dead_emails import DeadEmails

ACT = Act.of("ann@ops-1", "ann@example.org got it")


async def test_a_confirmed_email_is_sent_counted_and_audited(session: AsyncSession, dead_emails: DeadEmails) -> None:
    (email_id,) = dead_emails.create(status="held")

    verdict = await confirm(session, email_id, ACT)

    row = dead_emails.books.row(email_id)
    assert verdict is Verdict.CONFIRMED
    assert (row["status"], row["dead_letter_due_at"]) == ("sent", None)
    assert row["sent_at"] is not None
    assert dead_emails.books.hourly() == {"accepted": 1}
    (act,) = dead_emails.audit()
    assert (act["actor"], act["action"], act["email_id"]) == ("ann@ops-1", "confirm", email_id)
    assert act["reason"] == "<address> got it"


async def test_a_released_email_is_pending_and_due_with_all_attempts_again(
    session: AsyncSession, dead_emails: DeadEmails
) -> None:
    (email_id,) = dead_emails.create(status="held", dead_letter_due_at="2026-01-01T00:00:00Z")

    verdict = await release(session, email_id, ACT)

    row = dead_emails.books.row(email_id)
    assert verdict is Verdict.RELEASED
    assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 3, 3)
    assert (row["dead_letter_due_at"], row["published_at"]) == (None, None)
    assert row["publish_due_at"] is not None
    assert [act["action"] for act in dead_emails.audit()] == ["release"]


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ("sent", Verdict.ALREADY_SENT),
        ("pending", Verdict.UNDER_WAY),
        ("sending", Verdict.UNDER_WAY),
        ("failed", Verdict.FAILED),
    ],
)
async def test_an_email_that_is_not_held_is_not_changed(
    session: AsyncSession, dead_emails: DeadEmails, status: str, verdict: Verdict
) -> None:
    (email_id,) = dead_emails.create(status=status)
    before = dead_emails.books.row(email_id)

    verdicts = [await decide(session, email_id, ACT) for decide in (confirm, release)]

    assert verdicts == [verdict, verdict]
    assert dead_emails.books.row(email_id) == before
    assert dead_emails.audit() == []


async def test_an_unknown_id_gets_the_verdict_unknown(session: AsyncSession, dead_emails: DeadEmails) -> None:
    assert await confirm(session, uuid4(), ACT) is Verdict.UNKNOWN


async def test_an_email_without_content_is_not_released(session: AsyncSession, dead_emails: DeadEmails) -> None:
    (email_id,) = dead_emails.create(status="held")
    dead_emails.books.connection.execute("delete from email_content")

    assert await release(session, email_id, ACT) is Verdict.CONTENT_PRUNED
    assert dead_emails.books.status(email_id) == "held"


async def test_of_a_concurrent_confirm_and_release_one_is_applied(tables_url: str, dead_emails: DeadEmails) -> None:
    email_ids = dead_emails.create(20, status="held")

    async def decide_all(decide: object) -> list[Verdict]:
        async with await connect_async(tables_url, name="operator") as own:
            return [await decide(own, email_id, ACT) for email_id in email_ids]  # type: ignore[operator]

    confirmed, released = await asyncio.gather(decide_all(confirm), decide_all(release))

    won = [(a is Verdict.CONFIRMED, b is Verdict.RELEASED) for a, b in zip(confirmed, released, strict=True)]
    assert all(a != b for a, b in won)
    assert len(dead_emails.audit()) == 20
    assert dead_emails.books.statuses() == {
        status: count
        for status, count in (("sent", sum(a for a, _ in won)), ("pending", sum(b for _, b in won)))
        if count
    }


async def test_dead_letters_of_decided_emails_are_removed_and_the_others_keep_their_order(
    session: AsyncSession, dlq: DeadLetterQueue, dead_emails: DeadEmails
) -> None:
    email_ids = dead_emails.create(6, status="held")
    await dead_emails.publish_dead_letters(email_ids)
    await confirm(session, email_ids[1], ACT)
    await release(session, email_ids[4], ACT)

    assert await sweep(session, dlq) == 2
    assert await sweep(session, dlq) == 0

    left = await dead_emails.rabbit.take_all(dead_emails.topology.dlq, 4)
    assert [next(i for i in email_ids if str(i).encode() in taken.body) for taken in left] == [
        email_ids[n] for n in (0, 2, 3, 5)
    ]


def test_a_reason_is_required() -> None:
    with pytest.raises(DispatcherError, match="reason"):
        Act.of(None, "  ")


@pytest.mark.parametrize("statement", ["update operator_audit set reason = ''", "delete from operator_audit"])
async def test_audit_records_cannot_be_changed(session: AsyncSession, dead_emails: DeadEmails, statement: str) -> None:
    (email_id,) = dead_emails.create(status="held")
    await confirm(session, email_id, ACT)

    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        dead_emails.books.connection.execute(statement.encode())
