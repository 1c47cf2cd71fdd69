"""An event that proves less than it says is stored with its doubt. It changes no email, or suppresses nobody."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import pytest

from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.event import Bounce, EventKind
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.events.intake import EventIntake, Stored
from dispatcher.store.connections import Pool, connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.events.test_intake import event, make
from tests.store.books import Books
from tests.store.results import result

MakeEmail = Callable[[Books, LeaseStore, str], Awaitable[UUID]]


async def unleased(books: Books, _store: LeaseStore, _url: str) -> UUID:
    return books.enqueue_one()


async def scheduled(books: Books, _store: LeaseStore, _url: str) -> UUID:
    return books.enqueue_one(send_at=datetime.now(UTC) + timedelta(days=1))


async def cancelled(books: Books, _store: LeaseStore, _url: str) -> UUID:
    email_id = books.enqueue_one()
    books.change(email_id, status="cancelled", publish_due_at=None)
    return email_id


async def released(books: Books, store: LeaseStore, _url: str) -> UUID:
    email_id = books.enqueue_one()
    (lease,) = await store.lease(books.keys([email_id]), 60)
    await store.release({email_id: lease.token})
    return email_id


async def sms(books: Books, store: LeaseStore, _url: str) -> UUID:
    email_id = await make(books, store, Status.FAILED, provider="twilio")
    books.change(email_id, channel="sms")
    return email_id


def tried(status: Status, *providers: str) -> MakeEmail:
    """A function that makes an email with a recorded attempt for each provider; the last leads to the status."""

    async def make_tried(books: Books, store: LeaseStore, _url: str) -> UUID:
        email_id = books.enqueue_one()
        (lease,) = await store.lease(books.keys([email_id]), 60)
        for number, provider in enumerate(providers, start=1):
            then = status if number == len(providers) else Status.SENDING
            attempt = result(lease, then, provider=provider, attempt_number=number)
            assert await store.record([attempt]) == {email_id}
        return email_id

    return make_tried


async def leased(books: Books, store: LeaseStore, _url: str) -> UUID:
    return await make(books, store, Status.SENDING)


async def lost_with_its_host(books: Books, store: LeaseStore, url: str) -> UUID:
    email_id = await tried(Status.SENDING, "smtp")(books, store, url)
    books.change(email_id, locked_until=datetime.now(UTC) - timedelta(hours=1))
    async with await connect_async(url, name="test relay") as session:
        outbox = Outbox(session)
        assert await outbox.recover_expired(OnUncertain.HOLD, 5, await outbox.find_expiring())
    return email_id


async def sent_before_a_promotion(books: Books, _store: LeaseStore, _url: str) -> UUID:
    email_id = books.enqueue_one()
    books.connection.execute(
        "insert into relay_timeline (timeline, is_synchronous, uncertain_before) values (2, false, now())"
    )
    return email_id


async def held_after_a_restore(books: Books, store: LeaseStore, url: str) -> UUID:
    email_id = await tried(Status.WAITING, "ses")(books, store, url)
    books.change(email_id, status="held", was_uncertain=True, wait_until=None)
    return email_id


IMPOSSIBLE: Final = [
    unleased,
    scheduled,
    cancelled,
    released,
    sms,
    tried(Status.FAILED, "smtp"),
    tried(Status.HELD, "ses"),
    tried(Status.SENT, "smtp"),
    tried(Status.WAITING, "smtp", "ses"),
]
POSSIBLE: Final = [
    leased,
    lost_with_its_host,
    sent_before_a_promotion,
    held_after_a_restore,
    tried(Status.SENDING, "smtp"),
    tried(Status.HELD, "sendgrid"),
    tried(Status.SENT, "sendgrid"),
    tried(Status.SENT, "sendgrid", "smtp"),
    tried(Status.FAILED, "smtp", "sendgrid", "ses"),
]


@pytest.mark.parametrize("make_email", IMPOSSIBLE)
@pytest.mark.parametrize("kind", [EventKind.DELIVERED, EventKind.COMPLAINED, EventKind.REJECTED])
async def test_an_event_about_an_email_that_no_worker_sent_through_the_provider_is_stored_and_changes_nothing(
    intake: EventIntake, books: Books, store: LeaseStore, tables_url: str, make_email: MakeEmail, kind: EventKind
) -> None:
    books.connection.execute("update outgoing_feed set is_on = true")
    email_id = await make_email(books, store, tables_url)
    before, posts = books.row(email_id), books.count("outgoing_event")

    assert await intake.store([event(email_id, kind)]) == Stored()
    assert await intake.store([event(email_id, kind)]) == Stored(duplicates=1)

    assert [row["doubt"] for row in books.select("select doubt from email_event")] == ["impossible"]
    assert books.row(email_id) == before
    assert (books.count("suppression"), books.count("outgoing_event")) == (0, posts)


@pytest.mark.parametrize("make_email", POSSIBLE)
async def test_an_event_proves_acceptance_if_an_attempt_may_have_used_the_provider(
    intake: EventIntake, books: Books, store: LeaseStore, tables_url: str, make_email: MakeEmail
) -> None:
    email_id = await make_email(books, store, tables_url)

    assert (await intake.store([event(email_id)])).new == 1

    row = books.row(email_id)
    assert row["status"] == "sent" or (row["status"], row["proven_by"]) == ("sending", "sendgrid")
    assert [row["doubt"] for row in books.select("select doubt from email_event")] == [None]


async def test_an_email_with_an_impossible_event_is_sent_at_its_time(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    email_id = books.enqueue_one()
    await intake.store([event(email_id)])

    (lease,) = await store.lease(books.keys([email_id]), 60)

    assert lease.email_id == email_id


async def test_an_impossible_event_does_not_count_when_another_event_settles_the_email(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    email_id = await make(books, store, Status.HELD)

    await intake.store([event(email_id, provider="ses"), event(email_id, EventKind.REJECTED)])

    assert books.status(email_id) == "failed"


async def test_impossible_events_in_a_batch_leave_the_other_events_alone(
    intake: EventIntake, books: Books, store: LeaseStore
) -> None:
    impossible, possible = books.enqueue_one(), await make(books, store, Status.HELD)

    stored = await intake.store([event(impossible), event(possible), event(new_email_id())])

    assert stored == Stored(new=1, unknown=1, settled=1)
    assert (books.status(impossible), books.status(possible)) == ("pending", "sent")


@pytest.mark.parametrize("provider", ["sendgrid", "ses", "twilio", "smtp"])
@pytest.mark.parametrize(
    "kind", [(EventKind.BOUNCED, Bounce.HARD), (EventKind.COMPLAINED, None), (EventKind.UNSUBSCRIBED, None)]
)
@pytest.mark.parametrize("has_content", [True, False])
async def test_an_event_suppresses_only_an_address_to_which_the_email_was_sent(
    intake: EventIntake, books: Books, provider: str, kind: tuple[EventKind, Bounce | None], has_content: bool
) -> None:
    (email_id,) = books.enqueue_tried(to="Ann <Ann@Example.org>")
    if not has_content:
        books.connection.execute("delete from email_content")
    accused = [
        event(email_id, kind[0], bounce=kind[1], provider=provider, recipient=each)
        for each in ("bob@example.org", "ann@example.org")
    ]

    for each in accused:
        await intake.store([each])

    assert [entry["masked"] for entry in books.select("select masked from suppression")] == ["a•••@example.org"]
    doubts = books.select("select doubt from email_event order by doubt nulls last")
    assert [row["doubt"] for row in doubts] == ["recipient", None]


@pytest.mark.parametrize("others", [{"to": ["ann@example.org", "bob@example.org"]}, {"cc": "bob@example.org"},
                                    {"bcc": "bob@example.org"}])  # fmt: skip
@pytest.mark.parametrize("kind", [EventKind.BOUNCED, EventKind.COMPLAINED])
async def test_a_message_of_one_of_several_recipients_suppresses_none(
    intake: EventIntake, books: Books, others: dict[str, Any], kind: EventKind
) -> None:
    (email_id,) = books.enqueue_tried(**others)
    bounce = Bounce.HARD if kind is EventKind.BOUNCED else None

    for recipient in ("ann@example.org", "bob@example.org"):
        await intake.store([event(email_id, kind, provider="smtp", bounce=bounce, recipient=recipient)])

    assert [row["doubt"] for row in books.select("select doubt from email_event")] == ["recipient"] * 2
    assert books.count("suppression") == 0


async def test_a_recipient_named_twice_is_one_recipient(intake: EventIntake, books: Books) -> None:
    (email_id,) = books.enqueue_tried(to="ann@example.org", cc="Ann <ANN@example.org>")

    await intake.store([event(email_id, EventKind.COMPLAINED, provider="smtp")])

    assert books.count("suppression") == 1


async def test_doubtful_soft_bounces_do_not_count_towards_a_suppression(pool: Pool, books: Books) -> None:
    intake = EventIntake(pool, SuppressionRules(soft_bounces=2))
    group = books.enqueue_tried(3, cc="bob@example.org")
    (alone,) = books.enqueue_tried()

    for email_id in (*group, alone):
        await intake.store([event(email_id, EventKind.BOUNCED, bounce=Bounce.SOFT, provider="smtp")])

    assert books.count("suppression") == 0
