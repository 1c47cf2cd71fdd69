"""`forget` erases an address from finished emails, events and suppressions, and keeps the rows of the emails."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql

from dispatcher import Acceptance, Attachment, MessageKeyConflict, enqueue
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.suppression import Recipient, SuppressionReason, SuppressionRules
from dispatcher.events.intake import EventIntake
from dispatcher.ops.acts import Act
from dispatcher.ops.forgetting import FORGOTTEN, Forgetting, Forgotten
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import AsyncSession, connect_async, make_pool
from dispatcher.store.suppressions import Entry, insert_suppressions
from tests.store.books import Books, email

ACT = Act.of("ann@ops-1", "request 4711")
ANN = "ann@example.com"
QUOTE = "mailbox of ann is full"
NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


@pytest.fixture
def tables(books: Books) -> Books:
    """The tables of one test."""
    return books


def finished(books: Books, *, status: str = "sent", **fields: Any) -> UUID:
    """An email in a final status, with an attempt and a provider's text in both tables."""
    email_id = books.enqueue_one(**{"to": ANN, **fields})
    books.change(email_id, status=status, publish_due_at=None, last_error=QUOTE, provider="smtp")
    books.connection.execute(
        """
        insert into email_attempt
            (email_id, attempt_number, worker, provider, started_at, finished_at, outcome, error)
        values (%s, 1, 'w', 'smtp', now(), now(), 'accepted', %s)
        """,
        (email_id, QUOTE),
    )
    return email_id


async def report(url: str, email_id: UUID, recipient: str) -> None:
    """Stores a bounce of this recipient."""
    event = ProviderEvent(
        email_id=email_id,
        provider="sendgrid",
        kind=EventKind.BOUNCED,
        happened_at=NOW,
        recipient=recipient,
        bounce=Bounce.SOFT,
        code="550",
        detail=QUOTE,
    )
    pool = make_pool(url, name="test intake", size=1)
    await pool.open()
    await EventIntake(pool, SuppressionRules()).store([event])
    await pool.close()


async def forget(session: AsyncSession, address: str = ANN, **options: bool) -> Forgotten:
    return await Forgetting(session, address, ACT).run(**options)


def texts_of(books: Books) -> str:
    """Everything in the tables that may contain an address, as text."""
    words = ""
    for table in (
        *("email_log", "email_content", "email_attempt", "email_event", "email_recipient", "operator_audit"),
        "suppression",
    ):
        statement = sql.SQL("select t::text from {} as t").format(sql.Identifier(table))
        words += str(books.connection.execute(statement).fetchall())
    return words


@pytest.mark.parametrize(
    "fields",
    [
        {"to": "Ann <ANN@Example.COM>"},
        {"to": "bob@example.com", "cc": [ANN]},
        {"to": "bob@example.com", "bcc": [ANN]},
        {"to": "bob@example.com", "reply_to": [ANN]},
        {"to": ANN, "attachments": [Attachment("a.txt", "text/plain", b"dear ann")]},
    ],
    ids=["to", "cc", "bcc", "reply_to", "attachment"],
)
@pytest.mark.parametrize("status", ["sent", "failed", "held", "cancelled"])
async def test_content_attachments_and_texts_are_erased_and_the_row_stays(
    session: AsyncSession, tables: Books, fields: dict[str, Any], status: str
) -> None:
    email_id = finished(tables, status=status, **fields)

    forgotten = await forget(session)

    assert (forgotten.emails, forgotten.contents, forgotten.is_complete) == (1, 1, True)
    assert forgotten.attachments == len(fields.get("attachments", ()))
    assert [tables.count(table) for table in ("email_content", "email_attachment")] == [0, 0]
    row = tables.row(email_id)
    assert (row["status"], row["last_error"], row["provider"]) == (status, None, "smtp")
    (attempt,) = tables.attempts(email_id)
    assert (attempt["outcome"], attempt["error"]) == ("accepted", None)
    ((actor, action, reason),) = tables.connection.execute(
        "select actor, action, reason from operator_audit where email_id = %s", (email_id,)
    ).fetchall()
    assert (actor, action, reason) == ("ann@ops-1", "forget", "request 4711")
    assert ANN not in texts_of(tables).lower()
    assert QUOTE not in texts_of(tables)


async def test_the_hash_of_the_payload_is_erased_and_a_repeated_key_is_a_conflict(
    session: AsyncSession, tables: Books
) -> None:
    ann, bob = (email(name, to=f"{name}@example.com") for name in ("ann", "bob"))
    for one in (ann, bob):
        tables.change(enqueue(tables.connection, one).email_id, status="sent", publish_due_at=None)

    await forget(session)

    hashes = tables.connection.execute("select message_key, payload_hash from email_idempotency").fetchall()
    assert dict(hashes) == {"ann": b"", "bob": bob.payload_hash()}
    with pytest.raises(MessageKeyConflict, match="or was erased"):
        enqueue(tables.connection, ann)
    assert enqueue(tables.connection, bob).acceptance == Acceptance.KNOWN


async def test_other_recipients_keep_everything(session: AsyncSession, tables: Books) -> None:
    for other in ("joann@example.com", "ann@example.org", "ann@example.com.au", "ann+tag@example.com"):
        finished(tables, to=other)

    forgotten = await forget(session)

    assert forgotten == Forgotten(read=4, read_until=forgotten.read_until)
    assert tables.count("email_content") == 4
    assert tables.count("operator_audit") == 0


@pytest.mark.parametrize("address", ["zoë@bücher.example", "ZOË@xn--bcher-kva.example"])
async def test_addresses_are_compared_as_events_compare_them(
    session: AsyncSession, tables: Books, address: str
) -> None:
    finished(tables, to="Zoë <Zoë@bücher.example>")

    assert (await forget(session, address)).emails == 1


async def test_emails_that_are_not_finished_are_listed_and_not_changed(session: AsyncSession, tables: Books) -> None:
    pending, sending, waiting = (tables.enqueue_one(to=ANN) for _ in range(3))
    tables.change(sending, status="sending")
    tables.change(waiting, status="waiting", publish_due_at=None, wait_until=datetime.now(UTC) + timedelta(weeks=3))

    forgotten = await forget(session)

    assert forgotten.unfinished == [pending, sending, waiting]
    assert (forgotten.emails, forgotten.is_complete) == (0, False)
    assert tables.count("email_content") == 3


async def test_an_email_whose_row_is_locked_is_left_for_the_next_run(
    session: AsyncSession, tables: Books, tables_url: str
) -> None:
    email_id = finished(tables)
    async with await connect_async(tables_url, name="locker") as locker, locker.transaction():
        await locker.execute("select 1 from dispatcher.email_log where email_id = %s for update", (email_id,))
        forgotten = await forget(session)

    assert (forgotten.locked, forgotten.emails) == ([email_id], 0)
    assert (await forget(session)).emails == 1


async def test_events_lose_the_address_even_without_content(
    session: AsyncSession, tables: Books, tables_url: str
) -> None:
    with_content, without = finished(tables), finished(tables)
    shared = finished(tables, to=["bob@example.com", ANN])
    for email_id in (with_content, without, shared):
        await report(tables_url, email_id, ANN)
    await report(tables_url, shared, "bob@example.com")
    tables.connection.execute("delete from email_content where email_id = %s", (without,))
    hasher = await AddressHasher.open(session)

    forgotten = await forget(session)

    assert (forgotten.emails, forgotten.contents, forgotten.events) == (3, 2, 4)
    events = tables.connection.execute("select kind, address_hash, detail from email_event").fetchall()
    assert sorted((kind, hashed is None, detail) for kind, hashed, detail in events) == [
        ("bounced", False, None), ("bounced", True, None), ("bounced", True, None), ("bounced", True, None)
    ]  # fmt: skip
    kept = {bytes(hashed) for _, hashed, _ in events if hashed is not None}
    assert kept == {hasher.hash("bob@example.com")}


async def test_the_feed_of_outgoing_events_loses_the_address(session: AsyncSession, tables: Books) -> None:
    hasher = await AddressHasher.open(session)
    for address in (ANN, "bob@example.com"):
        tables.connection.execute(
            "insert into outgoing_event (kind, email_id, tenant_id, message_key, address_hash)"
            " values ('bounced', gen_random_uuid(), 'shop', 'key', %s)",
            (hasher.hash(address),),
        )

    await forget(session)

    rows = tables.connection.execute("select address_hash from outgoing_event").fetchall()
    assert {hashed and bytes(hashed) for (hashed,) in rows} == {None, hasher.hash("bob@example.com")}


async def test_a_second_run_finds_nothing_and_audits_nothing(
    session: AsyncSession, tables: Books, tables_url: str
) -> None:
    await report(tables_url, finished(tables), ANN)
    await forget(session, removes_suppressions=True)
    audited = tables.count("operator_audit")

    again = await forget(session, removes_suppressions=True)

    assert (again.emails, again.events, again.suppressions, again.is_complete) == (0, 0, 0, True)
    assert tables.count("operator_audit") == audited


@pytest.mark.parametrize("removes", [False, True], ids=["kept", "removed"])
async def test_a_suppression_is_kept_without_what_shows_the_address_or_removed(
    session: AsyncSession, tables: Books, removes: bool
) -> None:
    hasher = await AddressHasher.open(session)
    entries = [
        Entry.of(Recipient.parse(text), hasher, SuppressionReason.MANUAL, "ann called")
        for text in (ANN, "bob@example.com", "example.com")
    ]
    await insert_suppressions(session, "shop", entries, actor="ann", reason="asked")

    forgotten = await forget(session, removes_suppressions=removes)

    assert forgotten.suppressions == 1
    rows = tables.connection.execute("select address_hash, masked, note from suppression").fetchall()
    found = {bytes(hashed): (masked, note) for hashed, masked, note in rows}
    assert len(found) == (2 if removes else 3)
    assert found.get(hasher.hash(ANN)) == (None if removes else (FORGOTTEN, None))
    assert all(note == "ann called" for hashed, (_, note) in found.items() if hashed != hasher.hash(ANN))


async def test_a_dry_run_counts_the_same_and_changes_nothing(
    session: AsyncSession, tables: Books, tables_url: str
) -> None:
    with_content, without = finished(tables), finished(tables)
    for email_id in (with_content, without):
        await report(tables_url, email_id, ANN)
    tables.connection.execute("delete from email_content where email_id = %s", (without,))
    before = texts_of(tables)

    counted = await Forgetting(session, ANN, None).run()

    assert texts_of(tables) == before
    assert counted == await forget(session)


async def test_pages_and_batches_cover_every_email(session: AsyncSession, tables: Books) -> None:
    for number in range(10):
        finished(tables, to=ANN if number % 3 else "bob@example.com")
    seen: list[int] = []

    forgotten = await Forgetting(session, ANN, ACT, lambda done: seen.append(done.read), page=3, batch=2).run()

    assert (forgotten.emails, forgotten.read) == (6, 10)
    assert seen == sorted(seen)
