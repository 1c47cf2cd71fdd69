"""An operator and the HTTP API see the events of an email, and no address."""

from __future__ import annotations

import psycopg

from dispatcher.domain.event import Bounce, EventKind
from dispatcher.events.intake import EventIntake
from dispatcher.ops.email_history import find_history
from dispatcher.store.connections import connect_async
from tests.events.test_intake import event
from tests.store.books import Books


async def test_the_history_shows_events_with_the_recipients_position(
    intake: EventIntake, books: Books, tables_url: str
) -> None:
    (email_id,) = books.enqueue_tried(to=["ann@example.org", "Bob <bob@example.org>"], cc=["cho@example.org"])
    await intake.store(
        [
            event(email_id, recipient="CHO@example.org"),
            event(email_id, EventKind.BOUNCED, bounce=Bounce.HARD, recipient="bob@example.org", code="5.1.1"),
            event(email_id, EventKind.OPENED, recipient=None),
            event(email_id, EventKind.COMPLAINED, recipient="stranger@example.org"),
        ]
    )

    async with await connect_async(tables_url, name="test") as session:
        story = await find_history(session, email_id)
        assert story is not None
        positions = {each.kind: each.recipient for each in story.events}
        assert positions == {"delivered": 3, "bounced": 2, "opened": None, "complained": None}
        assert "example.org" not in str(story.events)

        books.connection.execute("delete from email_content")
        story = await find_history(session, email_id)
        assert story is not None
        assert {each.recipient for each in story.events} == {None}


async def test_a_reader_without_access_to_addresses_sees_events_without_recipients(
    intake: EventIntake, books: Books, tables_url: str
) -> None:
    (email_id,) = books.enqueue_tried()
    await intake.store([event(email_id)])
    role = f"reader_{email_id.hex}"
    with psycopg.connect(tables_url, autocommit=True) as owner:
        owner.execute(f"create role {role}".encode())
        try:
            for table in ("email_log", "every_attempt", "email_event", "operator_audit", "email_replay",
                          "email_replay_item", "domain_limit"):  # fmt: skip
                owner.execute(f"grant select on {table} to {role}".encode())
            owner.execute(f"grant usage on schema dispatcher to {role}".encode())
            async with await connect_async(tables_url, name="test") as session:
                await session.execute(f"set role {role}".encode())
                story = await find_history(session, email_id)
        finally:
            owner.execute(f"drop owned by {role}".encode())
            owner.execute(f"drop role {role}".encode())

    assert story is not None
    assert [each.recipient for each in story.events] == [None]
