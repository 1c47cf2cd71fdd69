"""The feed of events has every event once, in an order in which no reader misses one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest

from dispatcher.domain.event import OutgoingKind
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.domain.webhook import MAX_WEBHOOKS, new_secret
from dispatcher.errors import StoreUnavailable
from dispatcher.store.connections import AsyncSession
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from dispatcher.store.outgoing_events import ALL_KINDS, BEGINNING, Cursor, Position, Slice, read_page, read_slice
from dispatcher.store.retention import PrunedStep, Pruner, Retention
from dispatcher.store.statements import fetch
from dispatcher.store.webhooks import find_due_webhooks, restore_feed
from tests.store.books import Books
from tests.store.damage import disk_full
from tests.store.results import lease_one, result
from tests.waiting import wait_until

INSERT: Final = """
    insert into outgoing_event (kind, email_id, tenant_id, message_key)
    select 'sent', gen_random_uuid(), %s, 'key' from generate_series(1, %s)
    returning event_id
"""
INVISIBLE: Final = """
    select from outgoing_event, pg_current_snapshot() as s
    where made_in >= pg_snapshot_xmin(s) and made_in < pg_snapshot_xmax(s)
"""
NOW: Final = datetime.now(UTC)


def insert(connection: psycopg.Connection, tenant: str = "shop", count: int = 1) -> list[UUID]:
    return [row[0] for row in connection.execute(INSERT, [tenant, count]).fetchall()]


def await_feed(connection: psycopg.Connection) -> None:
    """Waits until the feed shows every committed event: an event stays invisible while an older transaction is open in
    any database of the server, and other processes run tests on the same server."""
    wait_until(lambda: not connection.execute(INVISIBLE).fetchall(), seconds=60)  # no test holds a transaction longer


def announce(connection: psycopg.Connection, tenant: str = "shop", count: int = 1) -> list[UUID]:
    """Adds events to the feed, and waits until they are visible; returns their ids in order."""
    event_ids = insert(connection, tenant, count)
    await_feed(connection)
    return event_ids


async def read(session: AsyncSession, after: Position = BEGINNING, limit: int = 100) -> Slice:
    return await read_slice(session, after, tenant="shop", kinds=ALL_KINDS, limit=limit)


def ids_of(part: Slice) -> list[UUID]:
    return [found.event.event_id for found in part.events]


async def test_no_event_is_written_until_an_application_wants_events(
    store: LeaseStore, session: AsyncSession, books: Books
) -> None:
    async def send() -> UUID:
        lease = await lease_one(store, books, tenant_id="shop", correlation_id="order-7")
        await store.record([result(lease, Status.SENT)])
        await_feed(books.connection)
        return lease.email_id

    await send()
    page = await read_page(session, None, tenant="shop", limit=100)
    assert (page.events, page.has_more) == ([], False)

    email_id = await send()

    sent = await read_page(session, Cursor.parse(page.next), tenant="shop", limit=100)
    ((event, _),) = sent.events
    assert (event.email_id, event.kind, event.tenant_id) == (email_id, OutgoingKind.SENT, "shop")
    assert (event.message_key, event.correlation_id, event.provider) == (books.key(email_id), "order-7", "smtp")
    assert event.event_id.version == 7
    lease = await lease_one(store, books, tenant_id="shop")
    await store.record([result(lease, Status.FAILED, error_type="suppressed")])
    await_feed(books.connection)
    ((suppressed, _),) = (await read_page(session, Cursor.parse(sent.next), tenant="shop", limit=100)).events
    assert (suppressed.kind, suppressed.reason) == (OutgoingKind.SUPPRESSED, "suppressed")


async def test_an_unsubscribe_from_a_topic_names_the_topic_and_one_from_all_emails_does_not(
    session: AsyncSession, books: Books
) -> None:
    email_id = books.enqueue_one(tenant_id="shop", topic="newsletter")
    kinds = {"unsubscribed": "group", "complained": None, "bounced": "group"}
    for kind, code in (*kinds.items(), ("unsubscribed", None)):
        books.connection.execute(
            "insert into outgoing_event (kind, email_id, tenant_id, message_key, code) "
            "values (%s, %s, 'shop', 'k', %s)",
            [kind, email_id, code],
        )
    await_feed(books.connection)

    events = [found.event for found in (await read(session)).events]

    assert [each.topic for each in events] == ["newsletter", None, None, None]
    assert events[0].document()["data"]["topic"] == "newsletter"


async def test_a_late_commit_loses_no_event(session: AsyncSession, books: Books, tables_url: str) -> None:
    first = announce(books.connection)
    with psycopg.connect(tables_url) as late:
        from_late = insert(late)
        later = insert(books.connection)

        before = await read(session)
        late.commit()

    await_feed(books.connection)
    after = await read(session, before.end)
    assert ids_of(before) == first
    assert ids_of(after) == from_late + later


async def test_a_reader_gets_the_feed_in_parts_and_only_of_its_tenant(session: AsyncSession, books: Books) -> None:
    wanted: list[UUID] = []
    for _ in range(5):
        insert(books.connection, "other", 7)
        wanted += insert(books.connection, "shop", 3)
    announce(books.connection, "other", 7)

    found: list[UUID] = []
    position, is_last = BEGINNING, False
    while not is_last:
        part = await read(session, position, limit=4)
        found += ids_of(part)
        position, is_last = part.end, part.is_last

    assert found == wanted


async def test_pages_end_where_the_limit_says_and_the_next_cursor_goes_on(session: AsyncSession, books: Books) -> None:
    wanted = announce(books.connection, "shop", 250)
    announce(books.connection, "other", 10)

    sizes, found, cursor, has_more = [], [], None, True
    while has_more:
        page = await read_page(session, cursor, tenant="shop", limit=100)
        sizes.append(len(page.events))
        found += [event.event_id for event, _ in page.events]
        cursor, has_more = Cursor.parse(page.next), page.has_more

    assert sizes == [100, 100, 50]
    assert found == wanted
    one = await read_page(session, None, tenant="shop", limit=3)
    again = await read_page(session, Cursor.parse(one.events[0][1]), tenant="shop", limit=2)
    assert [event.event_id for event, _ in again.events] == wanted[1:3]


def test_a_text_that_is_no_cursor_is_refused() -> None:
    for text in ("", "x", "MQ", "a" * 200, "MS4xLjE", "LTEuMS4xLjE", "ünicode", "MS4xLjEuMQ==="):
        with pytest.raises(ValueError, match="must be a cursor"):
            Cursor.parse(text)


async def test_cursors_from_before_a_restore_or_promotion_go_back_an_hour(session: AsyncSession, books: Books) -> None:
    (old,) = announce(books.connection)
    books.connection.execute(
        "update outgoing_event set event_id = overlay(event_id::text placing %s from 1 for 13)::uuid",
        [str(UUID(int=int((NOW - timedelta(hours=3)).timestamp() * 1000) << 80))[:13]],
    )
    recent = announce(books.connection)
    page = await read_page(session, None, tenant="shop", limit=100)
    cursor = Cursor.parse(page.next)
    for lost in (
        Cursor(cursor.timeline + 1, cursor.position, cursor.at),
        Cursor(cursor.timeline, Position(2**40, 1), cursor.at),
    ):
        again = await read_page(session, lost, tenant="shop", limit=100)
        assert [event.event_id for event, _ in again.events] == recent
    assert (await read_page(session, cursor, tenant="shop", limit=100)).events == []
    assert old not in recent


async def add_webhook(
    session: AsyncSession, url: str = "https://example.com", tenant_id: str | None = "shop", **more: Any
) -> int:
    """Adds a webhook; returns its id, or 0 if the tenant has too many."""
    values: dict[str, Any] = {"recipients": False, "secret": new_secret(), "most_webhooks": MAX_WEBHOOKS}
    values |= {"actor": "ann", "reason": "r"}
    values |= {"act": "webhook_add", "url": url, "tenant_id": tenant_id, "kinds": ALL_KINDS, **more}
    rows = await fetch(session, "insert_webhook", {**values, "kinds": sorted(map(str, values["kinds"]))})
    return int(rows[0][0]) if rows else 0


async def test_a_feed_from_a_dump_of_another_server_stays_readable(session: AsyncSession, books: Books) -> None:
    await add_webhook(session)
    handled = announce(books.connection, count=2)
    waiting = announce(books.connection, count=2)
    # The other server had executed more transactions than this one ever will.
    books.connection.execute("update outgoing_event set made_in = '1000000000000'")
    books.connection.execute(
        "update webhook set made_in = '1000000000000',"
        " position = (select max(position) from outgoing_event where event_id = any(%s))",
        [handled],
    )
    fresh = announce(books.connection)
    assert ids_of(await read(session)) == fresh

    assert await restore_feed(session)

    assert ids_of(await read(session)) == handled + waiting + fresh
    (webhook,) = await find_due_webhooks(session, now=datetime.now(UTC), busy=[])
    assert ids_of(await read(session, webhook.position)) == waiting + fresh
    assert not await restore_feed(session)


async def test_old_events_are_pruned_and_an_unwanted_feed_is_stopped(session: AsyncSession, books: Books) -> None:
    webhook_id = await add_webhook(session)
    (old,) = announce(books.connection)
    recent = announce(books.connection)
    age = NOW - timedelta(days=8)
    made_old = str(UUID(int=int(age.timestamp() * 1000) << 80))[:13] + str(old)[13:]
    books.connection.execute("update outgoing_event set event_id = %s where event_id = %s", [made_old, old])
    books.connection.execute("update outgoing_feed set wanted_at = clock_timestamp() - interval '8 days'")

    async def prune() -> list[object]:
        return [step async for step in Pruner(session, Retention(0, 0, 0, events_days=7)).prune()]

    def is_on() -> bool:
        return bool(books.select("select is_on from outgoing_feed")[0]["is_on"])

    assert await prune() == [PrunedStep("outgoing_event", 1)]
    assert ids_of(await read(session)) == recent
    assert is_on()
    books.connection.execute("delete from webhook where webhook_id = %s", [webhook_id])
    await prune()
    assert not is_on()


async def test_an_email_that_a_promotion_made_held_is_an_event(session: AsyncSession, books: Books) -> None:
    books.connection.execute("update outgoing_feed set is_on = true")
    email_id = books.enqueue_one(tenant_id="shop")
    books.change(email_id, publish_due_at=None, published_at=NOW - timedelta(hours=1))
    books.connection.execute(
        "insert into relay_timeline (timeline, is_synchronous, uncertain_before, doubted_at)"
        " values (1, false, clock_timestamp(), clock_timestamp() - interval '1 minute')"
    )

    await Outbox(session).republish_lost(["normal"], 1.0, 100, OnUncertain.HOLD, 5)

    await_feed(books.connection)
    (found,) = (await read(session)).events
    assert (books.status(email_id), found.event.kind, found.event.reason) == ("held", "held", "outcome_unknown")


async def test_a_full_disk_loses_no_result_and_no_event(store: LeaseStore, session: AsyncSession, books: Books) -> None:
    cursor = (await read_page(session, None, tenant="shop", limit=100)).next
    lease = await lease_one(store, books, tenant_id="shop")

    with disk_full(books.connection, "insert on outgoing_event for each row"), pytest.raises(StoreUnavailable):
        await store.record([result(lease, Status.SENT)])

    assert books.status(lease.email_id) == "sending"
    await store.record([result(lease, Status.SENT)])
    await_feed(books.connection)
    ((event, _),) = (await read_page(session, Cursor.parse(cursor), tenant="shop", limit=100)).events
    assert (event.email_id, event.kind) == (lease.email_id, OutgoingKind.SENT)


async def test_a_tenant_with_many_webhooks_leaves_room_for_the_webhooks_of_others(session: AsyncSession) -> None:
    of_shop = [await add_webhook(session, f"https://example.com/{number}") for number in range(MAX_WEBHOOKS + 1)]

    assert all(of_shop[:-1])
    assert not of_shop[-1]
    assert await add_webhook(session, tenant_id="bank")
    assert await add_webhook(session, tenant_id=None)
