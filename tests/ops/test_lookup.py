"""Emails are found by what an operator knows about them. No result has an address."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from dispatcher import enqueue_many
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail
from dispatcher.ops.acts import Act
from dispatcher.ops.forgetting import Forgetting
from dispatcher.ops.lookup import BUDGET, Budget, find
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import AsyncSession
from dispatcher.store.retention import Pruner, Retention
from tests.ops.dead_emails import Desk
from tests.store.books import Books, email

TODAY = datetime.now(UTC)
SMALL = Budget(rows=5, emails=5, checked=3, most_checked=6)
RUN = {"run": "7=b", "x": "y"}
STARTS: list[dict[str, Any]] = [
    {"recipient": "ann@example.org"},
    {"domain": "example.org"},
    {"correlation_id": "run"},
    {"metadata": "run=7=b"},
    {"status": Status.PENDING},
]


async def test_a_recipient_is_found_in_to_cc_and_bcc_however_it_is_written(desk: Desk) -> None:
    ids = [
        desk.books.enqueue_one(to="Ann <Ann@example.org>"),
        desk.books.enqueue_one(to="bob@example.org", cc="ann@EXAMPLE.org"),
        desk.books.enqueue_one(to="bob@example.org", bcc=["carol@example.net", "ann@example.org"]),
    ]
    desk.books.enqueue_one(to="joann@example.org", reply_to="ann@example.org")

    for to in ("Ann@Example.ORG", "Ann <ann@example.org>", " ann@example.org", '"Ann, A." <ANN@example.org>'):
        page = await find(desk.session, {"recipient": to})
        assert [row.id for row in page.rows] == ids[::-1], to
        assert (page.next, page.was_cut, page.recipients_since) == (None, False, None)


async def test_the_hash_in_postgresql_begins_the_hash_of_suppressions(desk: Desk) -> None:
    desk.books.enqueue_one(to=["ann@bücher.example", "Ünal@example.org"])

    rows = desk.books.select("select * from email_recipient order by ctid")

    hasher = await AddressHasher.open(desk.session)
    assert [(bytes(row["address_hash"]), row["domain"]) for row in rows] == [
        (hasher.hash("ann@xn--bcher-kva.example")[:6], "xn--bcher-kva.example"),
        (hasher.hash("Ünal@example.org")[:6], "example.org"),
    ]
    for domain in ("bücher.example", "@xn--bcher-kva.example", "BÜCHER.example"):
        assert len((await find(desk.session, {"domain": domain})).rows) == 1
    assert len((await find(desk.session, {"recipient": "ann@Bücher.example"})).rows) == 1


async def test_a_repeated_or_refused_enqueue_adds_no_recipient(books: Books) -> None:
    enqueue_many(books.connection, [email("once")])
    enqueue_many(books.connection, [email("once"), email("once", to="bob@example.org")], report_conflicts=True)

    assert books.count("email_recipient") == 1


async def test_filters_combine(desk: Desk) -> None:
    metadata = {"order": "17", "note": "a=b, c"}
    shop = {"correlation_id": "order-17", "tags": ["receipt"], "metadata": metadata, "tenant_id": "shop"}
    wanted = desk.books.enqueue_one(sender="Shop <Billing@Shop.example>", **shop)
    desk.books.connection.execute("update email_log set status = 'failed', error_type = 'refused', provider = 'ses'")
    desk.books.enqueue(3, correlation_id="order-18", tags=["receipt"], to="bob@example.net")
    day = timedelta(days=1)
    values: dict[str, tuple[Any, Any]] = {  # what the email has, and what it does not have
        "recipient": ("ann@example.org", "bob@example.net"),
        "domain": ("example.org", "example.net"),
        "correlation_id": ("order-17", "order-18"),
        "sender": ("billing@shop.example", "shop@example.com"),
        "tag": ("receipt", "other"),
        "metadata": ("note=a=b, c", "order=1"),
        "status": (Status.FAILED, Status.SENT),
        "created_from": (TODAY - day, TODAY + day),
        "created_before": (TODAY + day, TODAY - day),
        "provider": ("ses", "smtp"),
        "error_type": ("refused", "expired"),
        "tenant_id": ("shop", "other"),
        "lane": ("normal", "bulk"),
    }
    query = {name: right for name, (right, _) in values.items()}

    async def found(asked: dict[str, Any]) -> list[UUID]:
        return [row.id for row in (await find(desk.session, asked)).rows]

    assert await found(query) == await found({"sender": "@SHOP.example"}) == [wanted]
    for name, (right, wrong) in values.items():
        assert await found(query | {name: wrong}) == [], name
        assert wanted in await found({name: right}), name


@pytest.mark.parametrize("budget", [BUDGET, SMALL], ids=["usual", "small"])
@pytest.mark.parametrize(
    "query",
    [
        *({}, *STARTS, {"domain": "example.org", "tag": "receipt"}, {"sender": "shop@example.com"}),
        *({"delivery": "bounced"}, {"delivery": "bounced_hard", "text": "5.1.1 NO such"}, {"text": "no such user"}),
    ],
    ids=str,
)
async def test_pages_continue_where_the_previous_page_ended(desk: Desk, query: dict[str, Any], budget: Budget) -> None:
    ids = desk.books.enqueue(7, metadata=RUN, correlation_id="run", tags=["receipt"], to="ann@example.org")
    desk.books.enqueue(6, sender="x@example.net", to="bob@example.net", cc="c@example.net")
    desk.books.connection.execute(
        """
        with said as (
            insert into email_event (email_id, event_key, provider, kind, bounce, happened_at)
            select email_id, decode(n, 'hex'), 'ses', 'bounced', 'hard', now()
            from unnest(%s::uuid[]) as t (email_id), unnest(array['01', '02']) as k (n)
        )
        update email_log
        set delivery = 'bounced_hard', error_type = 'refused', last_error = '550 5.1.1 No such user'
        where email_id = any(%s)
        """,
        [ids, ids],
    )
    if query.keys() <= {"status"}:
        ids = [row["email_id"] for row in desk.books.rows()]

    found = []
    page = await find(desk.session, query, limit=2, budget=budget)
    for _ in range(30):
        found += [row.id for row in page.rows]
        assert page.was_cut == (len(page.rows) < 2 and page.next is not None)
        if page.next is None:
            break
        page = await find(desk.session, query, limit=2, after=page.next, budget=budget)

    assert found == ids[::-1]
    assert page.next is None


@pytest.mark.parametrize("query", STARTS, ids=str)
async def test_a_sealed_cursor_shows_no_foreign_email(desk: Desk, query: dict[str, Any]) -> None:
    wanted = desk.books.enqueue_one(to="ann@example.org", correlation_id="run", metadata=RUN, tenant_id="shop")
    ids = desk.books.enqueue(12, to="ann@example.org", correlation_id="run", metadata=RUN)
    query = query | {"tenant_id": "shop"}
    look_up = partial(find, desk.session, query, limit=5, budget=SMALL)

    page, cursors = await look_up(), []
    while page.next is not None and not page.rows:
        cursors.append(page.next)
        page = await look_up(after=page.next)

    assert [row.id for row in page.rows] == [wanted]
    assert cursors
    assert not {cursor.hex[:12] for cursor in cursors} & {each.hex[:12] for each in ids}  # the time, in milliseconds
    hasher = await AddressHasher.open(desk.session)
    assert hasher.unsealed(cursors[0], "shop") in ids
    assert hasher.unsealed(cursors[0], "other") not in ids


@pytest.mark.parametrize("query", [*STARTS[:2], STARTS[3]], ids=str)
async def test_pages_continue_over_weeks(desk: Desk, query: dict[str, Any]) -> None:
    """A look-up reads in windows of time. No email between two windows is left out or found twice."""
    desk.books.connection.execute(
        """
        with made as materialized (
            select email_id_lowest_at(now() - n * interval '7 hours 59 minutes') as email_id, n
            from generate_series(1, 200) as n
        ),
        logged as (
            insert into email_log (email_id, tenant_id, message_key, status)
            select email_id, 'default', 'old-' || n, 'sent' from made
        ),
        stored as (
            insert into email_content (email_id, sender, recipients, subject, metadata)
            select email_id, 'a@example.com', '{}', '', '{"run": "7=b"}' from made
        )
        insert into email_recipient (email_id, address_hash, domain)
        select email_id, (hash_addresses(array['ann@example.org']))[1], 'example.org' from made
        """
    )
    ids = [row["email_id"] for row in desk.books.select("select email_id from email_log order by email_id desc")]

    page = await find(desk.session, query, limit=30)
    found = [row.id for row in page.rows]
    while page.next is not None:
        page = await find(desk.session, query, limit=30, after=page.next)
        found += [row.id for row in page.rows]

    assert found == ids
    since = query | {"created_from": TODAY - timedelta(days=14), "created_before": TODAY - timedelta(days=7)}
    assert len((await find(desk.session, since)).rows) == 21


async def test_an_invalid_address_is_refused_without_repeating_it(session: AsyncSession) -> None:
    for field, text in (
        *(("recipient", "not an address secret@"), ("recipient", "secret")),
        *(("domain", "secret"), ("sender", "secret secret")),
    ):
        with pytest.raises(InvalidEmail) as refused:
            await find(session, {field: text})
        assert "secret" not in str(refused.value)


async def test_recipients_are_masked(desk: Desk) -> None:
    email_id = desk.books.enqueue_one(to="Ann <Ann@example.org>", cc="bob@example.net")
    erased = desk.books.enqueue_one()
    desk.books.connection.execute("delete from email_content where email_id = %s", [erased])

    shown = {row.id: row.recipients for row in (await find(desk.session, {})).rows}

    assert shown == {email_id: ["a•••@example.org", "b•••@example.net"], erased: None}


async def test_recipients_of_a_one_time_code_or_forgotten_email_are_erased(desk: Desk) -> None:
    code, other = desk.books.enqueue_one(erase_after_sending=True), desk.books.enqueue_one(cc="bob@example.net")
    desk.books.connection.execute("update email_log set status = 'sent', publish_due_at = null")

    _ = [step async for step in Pruner(desk.session, Retention(0, 0, 0)).delete_one_time_codes()]
    left = {row["email_id"] for row in desk.books.select("select email_id from email_recipient")}
    found = [row.id for row in (await find(desk.session, {"recipient": "ann@example.org"})).rows]
    await Forgetting(desk.session, "ann@example.org", Act.of("ann@ops-1", "request 4711")).run()

    assert (left, found, desk.books.count("email_recipient")) == ({other}, [other], 0)
    assert not (await find(desk.session, {"recipient": "bob@example.net"})).rows
    assert (desk.books.status(code), desk.books.status(other)) == ("sent", "sent")
