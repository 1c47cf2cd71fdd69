"""What a person says about a held email is done once, on record, and its dead letter goes."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import psycopg
import pytest

from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.ops.letters import sweep
from dispatcher.ops.verdicts import Verdict, confirm, release
from dispatcher.store.connections import AsyncSession, connect_async
from tests.ops.morgue import Morgue

ACT = Act.of("ann@ops-1", "ann@example.org got it")


async def test_a_confirmed_email_is_sent_counted_and_on_record(session: AsyncSession, morgue: Morgue) -> None:
    (email_id,) = morgue.bury(status="held")

    verdict = await confirm(session, email_id, ACT)

    row = morgue.books.row(email_id)
    assert verdict is Verdict.CONFIRMED
    assert (row["status"], row["dead_letter_due_at"]) == ("sent", None)
    assert row["sent_at"] is not None
    assert morgue.books.completed_at(email_id) is not None
    assert morgue.books.hourly() == {"accepted": 1}
    (act,) = morgue.audit()
    assert (act["actor"], act["action"], act["email_id"]) == ("ann@ops-1", "confirm", email_id)
    assert act["reason"] == "<address> got it"


async def test_a_released_email_is_pending_and_due_with_all_its_attempts_before_it(
    session: AsyncSession, morgue: Morgue
) -> None:
    (email_id,) = morgue.bury(status="held", dead_letter_due_at="2026-01-01T00:00:00Z")

    verdict = await release(session, email_id, ACT)

    row = morgue.books.row(email_id)
    assert verdict is Verdict.RELEASED
    assert (row["status"], row["attempt_count"], row["attempt_base"]) == ("pending", 3, 3)
    assert (row["dead_letter_due_at"], row["published_at"]) == (None, None)
    assert row["publish_due_at"] is not None
    assert [act["action"] for act in morgue.audit()] == ["release"]


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ("sent", Verdict.ALREADY_SENT),
        ("pending", Verdict.UNDER_WAY),
        ("sending", Verdict.UNDER_WAY),
        ("failed", Verdict.FAILED),
    ],
)
async def test_what_is_not_held_stays_as_it_is(
    session: AsyncSession, morgue: Morgue, status: str, verdict: Verdict
) -> None:
    (email_id,) = morgue.bury(status=status)
    before = morgue.books.row(email_id)

    verdicts = [await decide(session, email_id, ACT) for decide in (confirm, release)]

    assert verdicts == [verdict, verdict]
    assert morgue.books.row(email_id) == before
    assert morgue.audit() == []


async def test_an_unknown_id_is_told(session: AsyncSession, morgue: Morgue) -> None:
    assert await confirm(session, uuid4(), ACT) is Verdict.UNKNOWN


async def test_what_has_no_content_any_more_is_not_released(session: AsyncSession, morgue: Morgue) -> None:
    (email_id,) = morgue.bury(status="held")
    morgue.books.connection.execute("delete from email_content")

    assert await release(session, email_id, ACT) is Verdict.CONTENT_PRUNED
    assert morgue.books.status(email_id) == "held"


async def test_confirm_and_release_at_once_do_one_of_them(tables_url: str, morgue: Morgue) -> None:
    email_ids = morgue.bury(20, status="held")

    async def decide_all(decide: object) -> list[Verdict]:
        async with await connect_async(tables_url, name="operator") as own:
            return [await decide(own, email_id, ACT) for email_id in email_ids]  # type: ignore[operator]

    confirmed, released = await asyncio.gather(decide_all(confirm), decide_all(release))

    won = [(a is Verdict.CONFIRMED, b is Verdict.RELEASED) for a, b in zip(confirmed, released, strict=True)]
    assert all(a != b for a, b in won)
    assert len(morgue.audit()) == 20
    assert morgue.books.statuses() == {
        status: count
        for status, count in (("sent", sum(a for a, _ in won)), ("pending", sum(b for _, b in won)))
        if count
    }


async def test_the_dead_letters_of_decided_emails_leave_and_the_others_stay_in_their_order(
    session: AsyncSession, dlq: DeadLetterQueue, morgue: Morgue
) -> None:
    email_ids = morgue.bury(6, status="held")
    await morgue.announce(email_ids)
    await confirm(session, email_ids[1], ACT)
    await release(session, email_ids[4], ACT)

    assert await sweep(session, dlq) == 2
    assert await sweep(session, dlq) == 0

    left = await morgue.rabbit.take_all(morgue.topology.dlq, 4)
    assert [next(i for i in email_ids if str(i).encode() in taken.body) for taken in left] == [
        email_ids[n] for n in (0, 2, 3, 5)
    ]


def test_a_reason_is_needed() -> None:
    with pytest.raises(DispatcherError, match="reason"):
        Act.of(None, "  ")


@pytest.mark.parametrize("statement", ["update operator_audit set reason = ''", "delete from operator_audit"])
async def test_what_is_on_record_stays_there(session: AsyncSession, morgue: Morgue, statement: str) -> None:
    (email_id,) = morgue.bury(status="held")
    await confirm(session, email_id, ACT)

    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        morgue.books.connection.execute(statement.encode())
