"""Emails are found by what an operator knows about them. No result has an address."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail
from dispatcher.ops.acts import Act
from dispatcher.ops.forgetting import Forgetting
from dispatcher.ops.lookup import BUDGET, Budget, find
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import AsyncSession
from tests.store.books import Books

TODAY = datetime.now(UTC)


@pytest.mark.parametrize(
    "to",
    ["ann@example.org", "Ann@Example.ORG", "Ann <ann@example.org>", " ann@example.org", '"Ann, A." <ANN@example.org>'],
)
async def test_a_recipient_is_found_in_to_cc_and_bcc_however_it_is_written(
    session: AsyncSession, books: Books, to: str
) -> None:
    ids = [
        books.enqueue_one(to="Ann <Ann@example.org>"),
        books.enqueue_one(to="bob@example.org", cc="ann@EXAMPLE.org"),
        books.enqueue_one(to="bob@example.org", bcc=["carol@example.net", "ann@example.org"]),
    ]
    books.enqueue_one(to="joann@example.org", reply_to="ann@example.org")

    page = await find(session, {"recipient": to})

    assert [row.id for row in page.rows] == ids[::-1]
    assert (page.next, page.was_cut, page.recipients_since) == (None, False, None)


async def test_the_hash_in_postgresql_begins_the_hash_of_events_and_suppressions(
    session: AsyncSession, books: Books
) -> None:
    books.enqueue_one(to=["ann@bücher.example", "Ünal@example.org"])

    rows = books.select("select * from email_recipient order by ctid")

    hasher = await AddressHasher.open(session)
    assert [(bytes(row["address_hash"]), row["domain"]) for row in rows] == [
        (hasher.hash("ann@xn--bcher-kva.example")[:6], "xn--bcher-kva.example"),
        (hasher.hash("Ünal@example.org")[:6], "example.org"),
    ]
    for domain in ("bücher.example", "@xn--bcher-kva.example", "BÜCHER.example"):
        assert len((await find(session, {"domain": domain})).rows) == 1
    assert len((await find(session, {"recipient": "ann@Bücher.example"})).rows) == 1


async def test_a_repeated_or_refused_enqueue_adds_no_recipient(books: Books) -> None:
    from dispatcher import enqueue_many
    from tests.store.books import email

    enqueue_many(books.connection, [email("once")])
    enqueue_many(books.connection, [email("once"), email("once", to="bob@example.org")], report_conflicts=True)

    assert books.count("email_recipient") == 1


async def test_filters_combine(session: AsyncSession, books: Books) -> None:
    wanted = books.enqueue_one(
        sender="Shop <Billing@Shop.example>", correlation_id="order-17", tags=["receipt"], tenant_id="shop"
    )
    books.connection.execute("update email_log set status = 'failed', error_type = 'refused', provider = 'ses'")
    books.enqueue(3, correlation_id="order-18", tags=["receipt"], to="bob@example.net")
    query = {
        "recipient": "ann@example.org",
        "domain": "example.org",
        "correlation_id": "order-17",
        "sender": "billing@shop.example",
        "tag": "receipt",
        "status": Status.FAILED,
        "created_from": TODAY - timedelta(days=1),
        "created_before": TODAY + timedelta(days=1),
        "provider": "ses",
        "error_type": "refused",
        "tenant_id": "shop",
        "lane": "normal",
    }

    assert [row.id for row in (await find(session, query)).rows] == [wanted]
    for name, value in (
        ("recipient", "bob@example.net"),
        ("domain", "example.net"),
        ("correlation_id", "order-18"),
        ("sender", "shop@example.com"),
        ("tag", "other"),
        ("status", Status.SENT),
        ("created_from", TODAY + timedelta(days=1)),
        ("created_before", TODAY - timedelta(days=1)),
        ("provider", "smtp"),
        ("error_type", "expired"),
        ("tenant_id", "other"),
        ("lane", "bulk"),
    ):
        assert not (await find(session, query | {name: value})).rows, name
    for name in ("recipient", "domain", "correlation_id", "sender", "tag", "status"):
        only = {name: query[name]}
        assert wanted in [row.id for row in (await find(session, only)).rows], name
    assert [row.id for row in (await find(session, {"sender": "@SHOP.example"})).rows] == [wanted]


@pytest.mark.parametrize("budget", [BUDGET, Budget(rows=5, emails=5, checked=3, most_checked=6)])
@pytest.mark.parametrize(
    "query",
    [
        {},
        {"recipient": "ann@example.org"},
        {"domain": "example.org"},
        {"domain": "example.org", "tag": "receipt"},
        {"correlation_id": "run"},
        {"status": Status.PENDING},
        {"sender": "shop@example.com"},
    ],
)
async def test_pages_continue_where_the_previous_page_ended(
    session: AsyncSession, books: Books, query: dict[str, Any], budget: Budget
) -> None:
    ids = books.enqueue(7, correlation_id="run", tags=["receipt"], to="ann@example.org")
    books.enqueue(6, sender="x@example.net", to="bob@example.net", cc="c@example.net")
    if query.keys() <= {"status"}:
        ids = [row["email_id"] for row in books.rows()]

    found = []
    page = await find(session, query, limit=2, budget=budget)
    for _ in range(30):
        found += [row.id for row in page.rows]
        assert page.was_cut == (len(page.rows) < 2 and page.next is not None)
        if page.next is None:
            break
        page = await find(session, query, limit=2, after=page.next, budget=budget)

    assert found == ids[::-1]
    assert page.next is None


@pytest.mark.parametrize(
    "query",
    [
        {"recipient": "ann@example.org"},
        {"domain": "example.org"},
        {"correlation_id": "run"},
        {"status": Status.PENDING},
    ],
)
async def test_a_sealed_cursor_shows_a_tenant_no_email_of_another_tenant(
    session: AsyncSession, books: Books, query: dict[str, Any]
) -> None:
    wanted = books.enqueue_one(to="ann@example.org", correlation_id="run", tenant_id="shop")
    ids = books.enqueue(12, to="ann@example.org", correlation_id="run")
    query = query | {"tenant_id": "shop"}
    look_up = partial(find, session, query, limit=5, budget=Budget(rows=5, emails=5, checked=3, most_checked=6))

    page, cursors = await look_up(), []
    while page.next is not None and not page.rows:
        cursors.append(page.next)
        page = await look_up(after=page.next)

    assert [row.id for row in page.rows] == [wanted]
    assert cursors
    assert not {cursor.hex[:12] for cursor in cursors} & {each.hex[:12] for each in ids}  # the time, in milliseconds
    hasher = await AddressHasher.open(session)
    assert hasher.unsealed(cursors[0], "shop") in ids
    assert hasher.unsealed(cursors[0], "other") not in ids


@pytest.mark.parametrize("query", [{"recipient": "ann@example.org"}, {"domain": "example.org"}])
async def test_pages_continue_over_weeks(session: AsyncSession, books: Books, query: dict[str, Any]) -> None:
    """A look-up reads in windows of time. No email between two windows is left out or found twice."""
    books.connection.execute(
        """
        with made as materialized (
            select email_id_lowest_at(now() - n * interval '7 hours 59 minutes') as email_id, n
            from generate_series(1, 200) as n
        ),
        logged as (
            insert into email_log (email_id, tenant_id, message_key, status)
            select email_id, 'default', 'old-' || n, 'sent' from made
        )
        insert into email_recipient (email_id, address_hash, domain)
        select email_id, (hash_addresses(array['ann@example.org']))[1], 'example.org' from made
        """
    )
    ids = [row["email_id"] for row in books.select("select email_id from email_log order by email_id desc")]

    found = []
    page = await find(session, query, limit=30)
    while page.next is not None:
        found += [row.id for row in page.rows]
        page = await find(session, query, limit=30, after=page.next)
    found += [row.id for row in page.rows]

    assert found == ids
    since = query | {"created_from": TODAY - timedelta(days=14), "created_before": TODAY - timedelta(days=7)}
    assert len((await find(session, since)).rows) == 21


@pytest.mark.parametrize(
    "query",
    [
        {"recipient": "not an address secret@"},
        {"recipient": "secret"},
        {"domain": "secret"},
        {"sender": "secret secret"},
    ],
)
async def test_an_invalid_address_is_refused_without_repeating_it(session: AsyncSession, query: dict[str, Any]) -> None:
    with pytest.raises(InvalidEmail) as refused:
        await find(session, query)

    assert "secret" not in str(refused.value)


async def test_recipients_are_masked(session: AsyncSession, books: Books) -> None:
    email_id, erased = books.enqueue_one(to="Ann <Ann@example.org>", cc="bob@example.net"), books.enqueue_one()
    books.connection.execute("delete from email_content where email_id = %s", [erased])

    shown = {row.id: row.recipients for row in (await find(session, {})).rows}

    assert shown == {email_id: ["a•••@example.org", "b•••@example.net"], erased: None}


async def test_older_emails_are_reported_as_not_found_by_recipient(session: AsyncSession, books: Books) -> None:
    books.enqueue_one()
    books.connection.execute("begin")
    (since,) = (
        books.connection.execute(
            "update dispatcher_database set recipients_since = now() + interval '1 hour' returning recipients_since"
        ).fetchone()
        or ()
    )
    books.connection.execute("commit")
    try:
        by_recipient = await find(session, {"recipient": "ann@example.org"})
        by_status = await find(session, {"status": Status.PENDING})
    finally:
        books.connection.execute("update dispatcher_database set recipients_since = now() - interval '1 hour'")

    assert by_recipient.recipients_since == since
    assert by_status.recipients_since is None


async def test_the_recipients_of_a_one_time_code_are_erased_with_its_content(
    session: AsyncSession, books: Books
) -> None:
    from dispatcher.store.retention import Pruner, Retention

    code, other = books.enqueue_one(erase_after_sending=True), books.enqueue_one()
    books.connection.execute("update email_log set status = 'sent'")

    _ = [step async for step in Pruner(session, Retention(0, 0, 0)).delete_one_time_codes()]

    assert books.count("email_log") == 2
    assert [row["email_id"] for row in books.select("select email_id from email_recipient")] == [other]
    assert [row.id for row in (await find(session, {"recipient": "ann@example.org"})).rows] == [other]
    assert code != other


async def test_the_recipients_of_a_forgotten_email_are_erased(session: AsyncSession, books: Books) -> None:
    email_id = books.enqueue_one(cc="bob@example.net")
    books.connection.execute("update email_log set status = 'sent', publish_due_at = null")

    await Forgetting(session, "ann@example.org", Act.of("ann@ops-1", "request 4711")).run()

    assert books.count("email_recipient") == 0
    assert books.status(email_id) == "sent"
    assert not (await find(session, {"recipient": "bob@example.net"})).rows
