"""The timeline of an email has every instant that is known, oldest first."""

from __future__ import annotations

from uuid import UUID

import pytest

from dispatcher.actions.held import Confirm
from dispatcher.actions.runner import Face, Who, run_batch
from dispatcher.actions.unsent import Cancel
from dispatcher.domain.status import Status
from dispatcher.ops.acts import Act
from dispatcher.ops.email_history import find_history
from dispatcher.store.connections import AsyncSession
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.ops.decisions import decide
from tests.store.books import Books
from tests.store.results import result

ACT = Act.of("ann@ops-1", "the provider shows it")


async def words(session: AsyncSession, email_id: UUID) -> list[str]:
    history = await find_history(session, email_id)
    assert history is not None
    instants = [moment.at for moment in history.timeline]
    assert instants == sorted(instants)
    return [moment.what for moment in history.timeline]


async def test_a_sent_email_was_enqueued_published_leased_and_tried(
    session: AsyncSession, books: Books, store: LeaseStore
) -> None:
    email_id = books.enqueue_one()
    outbox = Outbox(session)
    await outbox.mark_published({each.email_id: each.due_at for each in await outbox.find_publish_due(1)})
    (lease,) = await store.lease(books.keys([email_id]), 60)
    await store.record([result(lease, Status.SENDING, error_type="throttled", provider_code="421")])
    await store.record([result(lease, Status.SENT, attempt_number=2)])

    found = await words(session, email_id)

    assert found[:3] == ["enqueued", "published", "leased"]
    assert sorted(found[3:]) == ["attempt 1: deferred", "attempt 2: accepted", "sent"]


async def test_a_failure_has_an_instant_and_so_has_its_dead_letter(
    session: AsyncSession, books: Books, store: LeaseStore
) -> None:
    email_id = books.enqueue_one()
    (lease,) = await store.lease(books.keys([email_id]), 60)
    await store.record([result(lease, Status.FAILED, error_type="refused", error="550 no")])
    outbox = Outbox(session)
    await outbox.mark_dead_lettered({each.email_id: each.failed_at for each in await outbox.find_dead_letter_due(1)})

    found = await words(session, email_id)

    assert found.index("failed") < found.index("dead-lettered") == len(found) - 1
    assert books.row(email_id)["settled_at"] is not None


async def test_a_decision_has_its_actor_and_reason(session: AsyncSession, books: Books, store: LeaseStore) -> None:
    email_id = books.enqueue_one()
    (lease,) = await store.lease(books.keys([email_id]), 60)
    await store.record([result(lease, Status.HELD, error_type="outcome_unknown")])
    held_since = books.row(email_id)["settled_at"]
    before = await words(session, email_id)
    await decide(session, Confirm(reason=ACT.reason), email_id, actor=ACT.actor)
    history = await find_history(session, email_id)

    assert held_since is not None
    assert before[-1] == "held"
    assert history is not None
    (moment,) = [moment for moment in history.timeline if moment.what == "confirm"]
    assert (moment.actor, moment.reason) == (ACT.actor, ACT.reason)


async def test_a_cancelled_email_has_the_instant_of_its_cancellation(session: AsyncSession, books: Books) -> None:
    email_id = books.enqueue_one()
    async for _ in run_batch(session, Cancel(reason=ACT.reason), Who(Face.COMMAND, ACT.actor), [email_id]):
        pass

    assert sorted(await words(session, email_id)) == ["cancel", "cancelled", "enqueued"]


@pytest.mark.parametrize(
    ("doubt", "words"),
    [
        ("impossible", "without effect, because no worker sent the email through this provider"),
        ("recipient", "suppresses no recipient, because nothing proves that it is about this one"),
    ],
)
async def test_an_event_in_doubt_says_in_words_what_it_does_not_do(
    session: AsyncSession, books: Books, doubt: str, words: str
) -> None:
    email_id = books.enqueue_one()
    books.connection.execute(
        "insert into email_event (event_key, provider, email_id, kind, bounce, doubt, happened_at)"
        " values (uuid_send(gen_random_uuid()), 'smtp', %s, 'bounced', 'hard', %s, now())",
        [email_id, doubt],
    )

    history = await find_history(session, email_id)

    assert history is not None
    (moment,) = [moment for moment in history.timeline if moment.what == "bounced (hard)"]
    assert moment.detail == f"smtp: {words}"
