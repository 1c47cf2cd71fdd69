"""Bounces, complaints and unsubscribes suppress their recipients, once and for the email's tenant only."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dispatcher.config import load
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.suppression import SuppressionReason, SuppressionRules
from dispatcher.events.intake import EventIntake, suppression_rules
from dispatcher.store.connections import Pool
from tests.events.test_intake import AT, event
from tests.store.books import Books, Row
from tests.store.suppressing import hasher_of, suppress, unsuppress


def bounce(email_id: Any, kind: Bounce = Bounce.HARD, **fields: Any) -> ProviderEvent:
    return event(email_id, EventKind.BOUNCED, bounce=kind, **fields)


def entries(books: Books) -> list[Row]:
    return books.select("select * from suppression order by suppression_id")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (EventKind.BOUNCED, "hard_bounce"),
        (EventKind.COMPLAINED, "complaint"),
        (EventKind.UNSUBSCRIBED, "unsubscribe"),
    ],
)
async def test_the_recipient_is_suppressed_for_ever_without_an_address_in_the_clear(
    intake: EventIntake, books: Books, kind: EventKind, reason: str
) -> None:
    (email_id,) = books.enqueue_tried(tenant_id="shop")
    happened = event(
        email_id, kind, bounce=Bounce.HARD if kind is EventKind.BOUNCED else None, recipient="Ann <Ann@Example.org>"
    )

    await intake.store([happened])

    (entry,) = entries(books)
    hashed = hasher_of(books.connection).hash("ann@example.org")
    assert (entry["tenant_id"], entry["address_hash"], entry["reason"]) == ("shop", hashed, reason)
    assert (entry["masked"], entry["is_domain"], entry["expires_at"]) == ("a•••@example.org", False, None)
    assert (entry["source_email_id"], entry["source_event_key"]) == (email_id, happened.key(hashed))


@pytest.mark.parametrize("kind", [Bounce.SOFT, Bounce.BLOCKED])
async def test_soft_bounces_and_blocks_suppress_nobody(intake: EventIntake, books: Books, kind: Bounce) -> None:
    emails = books.enqueue_tried(5)

    await intake.store([bounce(each, kind) for each in emails])

    assert entries(books) == []


async def test_an_event_that_the_provider_repeats_never_brings_a_removed_entry_back(
    intake: EventIntake, books: Books
) -> None:
    bounced = bounce(books.enqueue_tried()[0])
    await intake.store([bounced])
    unsuppress(books.connection, "ann@example.org")

    await intake.store([bounced])

    assert entries(books) == []


async def test_a_complaint_that_names_several_recipients_of_an_email_suppresses_none(
    intake: EventIntake, books: Books
) -> None:
    (unclear,) = books.enqueue_tried(to=["ann@example.org", "bob@example.org"])
    (clear,) = books.enqueue_tried(to="cem@example.org")

    await intake.store(
        [
            event(unclear, EventKind.COMPLAINED, recipient="ann@example.org"),
            event(unclear, EventKind.COMPLAINED, recipient="bob@example.org"),
            event(clear, EventKind.COMPLAINED, recipient="cem@example.org"),
        ]
    )

    assert [entry["masked"] for entry in entries(books)] == ["c•••@example.org"]


async def test_an_entry_that_lasts_as_long_stays_and_a_shorter_one_is_replaced(
    intake: EventIntake, books: Books
) -> None:
    suppress(books.connection, "ann@example.org", expires_in="1 day")
    suppress(books.connection, "bob@example.org")
    emails = books.enqueue_tried(2)

    await intake.store(
        [
            event(emails[0], EventKind.COMPLAINED),
            event(emails[1], EventKind.COMPLAINED, recipient="bob@example.org"),
        ]
    )

    assert [(entry["reason"], entry["expires_at"]) for entry in entries(books)] == [
        ("complaint", None),
        ("hard_bounce", None),
    ]


async def test_two_events_about_one_address_in_one_batch_make_one_entry(intake: EventIntake, books: Books) -> None:
    emails = books.enqueue_tried(2)

    await intake.store([bounce(emails[0]), bounce(emails[1]), event(emails[1], EventKind.COMPLAINED)])

    assert len(entries(books)) == 1


async def test_only_the_configured_events_suppress_and_an_entry_ends_after_the_configured_days(
    pool: Pool, books: Books
) -> None:
    given = {"DATABASE_URL": "postgresql://db/x", "AMQP_URL": "amqp://mq/", "PROVIDERS": "capture"}
    settings = load({f"DISPATCHER_{name}": value for name, value in given.items()})
    assert suppression_rules(settings) == SuppressionRules()
    rules = SuppressionRules(reasons=frozenset([SuppressionReason.COMPLAINT]), days=30)
    emails = books.enqueue_tried(2, to=["ann@example.org", "bob@example.org"])

    await EventIntake(pool, rules).store(
        [bounce(emails[0]), event(emails[1], EventKind.COMPLAINED, recipient="bob@example.org")]
    )

    (entry,) = entries(books)
    assert (entry["masked"], entry["reason"]) == ("b•••@example.org", "complaint")
    assert entry["expires_at"] - entry["created_at"] > timedelta(days=29)


async def test_soft_bounces_of_several_emails_suppress_if_that_is_configured(pool: Pool, books: Books) -> None:
    intake = EventIntake(pool, SuppressionRules(soft_bounces=3))
    emails = books.enqueue_tried(3)
    books.enqueue_one(tenant_id="other")

    await intake.store([bounce(emails[0], Bounce.SOFT), bounce(emails[0], Bounce.SOFT, happened_at=AT - timedelta(1))])
    await intake.store([bounce(emails[1], Bounce.SOFT)])
    assert entries(books) == []
    await intake.store([bounce(emails[2], Bounce.SOFT)])

    (entry,) = entries(books)
    assert entry["reason"] == "soft_bounce"
