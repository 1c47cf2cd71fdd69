"""`forget` erases an address from finished emails, events and suppressions, and keeps the rows of the emails."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from dispatcher import Acceptance, Attachment, MessageKeyConflict, enqueue
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.suppression import Recipient, SuppressionReason, SuppressionRules
from dispatcher.events.intake import EventIntake
from dispatcher.ops.acts import Act
from dispatcher.ops.forgetting import FORGOTTEN, Forgetting, Forgotten
from dispatcher.store.address_hashes import AddressHasher, hash_with_topic
from dispatcher.store.connections import AsyncSession, connect_async, make_pool
from dispatcher.store.suppressions import Entry, insert_suppressions
from tests.ops.dead_emails import Desk
from tests.store.books import Books, email

ACT = Act.of("ann@ops-1", "request 4711")
ANN = "ann@example.com"
QUOTE = "mailbox of ann is full"


def finished(books: Books, *, status: str = "sent", **fields: Any) -> UUID:
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
    about: dict[str, Any] = {"email_id": email_id, "recipient": recipient, "code": "550", "detail": QUOTE}
    event = ProviderEvent(
        **about, provider="sendgrid", kind=EventKind.BOUNCED, bounce=Bounce.SOFT, happened_at=datetime.now(UTC)
    )
    pool = make_pool(url, name="test intake", size=1)
    await pool.open()
    await EventIntake(pool, SuppressionRules()).store([event])
    await pool.close()


async def forget(session: AsyncSession, address: str = ANN, **options: bool) -> Forgotten:
    return await Forgetting(session, address, ACT).run(**options)


def texts_of(books: Books) -> str:
    names = ("email_log", "email_content", "email_attempt", "email_event", "email_recipient", "suppression")
    return str([books.select(f"table {name}") for name in (*names, "operator_audit")])


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        ("sent", {"to": "Ann <ANN@Example.COM>"}),
        ("failed", {"to": "bob@example.com", "cc": [ANN]}),
        ("held", {"to": "bob@example.com", "bcc": [ANN]}),
        ("cancelled", {"to": "bob@example.com", "reply_to": [ANN]}),
        ("sent", {"to": ANN, "attachments": [Attachment("a.txt", "text/plain", b"dear ann")]}),
    ],
    ids=["to", "cc", "bcc", "reply_to", "attachment"],
)
async def test_content_attachments_and_texts_are_erased_and_the_row_stays(
    desk: Desk, status: str, fields: dict[str, Any]
) -> None:
    email_id = finished(desk.books, status=status, **fields)

    forgotten = await forget(desk.session)

    assert (forgotten.emails, forgotten.contents, forgotten.is_complete) == (1, 1, True)
    assert forgotten.attachments == len(fields.get("attachments", ()))
    assert [desk.books.count(table) for table in ("email_content", "email_attachment")] == [0, 0]
    row = desk.books.row(email_id)
    assert (row["status"], row["last_error"], row["provider"]) == (status, None, "smtp")
    (attempt,) = desk.books.attempts(email_id)
    assert (attempt["outcome"], attempt["error"]) == ("accepted", None)
    (act,) = [act for act in desk.audit() if act["email_id"] == email_id]
    assert (act["actor"], act["action"], act["reason"]) == ("ann@ops-1", "forget", "request 4711")
    assert ANN not in texts_of(desk.books).lower()
    assert QUOTE not in texts_of(desk.books)


async def test_the_payloads_hash_is_erased_and_a_repeated_key_is_a_conflict(desk: Desk) -> None:
    ann, bob = (email(name, to=f"{name}@example.com") for name in ("ann", "bob"))
    for one in (ann, bob):
        desk.books.change(enqueue(desk.books.connection, one).email_id, status="sent", publish_due_at=None)

    await forget(desk.session)

    hashes = desk.books.connection.execute("select message_key, payload_hash from email_idempotency").fetchall()
    assert dict(hashes) == {"ann": b"", "bob": bob.payload_hash()}
    with pytest.raises(MessageKeyConflict, match="or was erased"):
        enqueue(desk.books.connection, ann)
    assert enqueue(desk.books.connection, bob).acceptance == Acceptance.KNOWN


async def test_only_the_same_address_is_forgotten_however_it_is_written(desk: Desk) -> None:
    for other in ("joann@example.com", "ann@example.org", "ann@example.com.au", "ann+tag@example.com"):
        finished(desk.books, to=other)

    forgotten = await forget(desk.session)

    assert forgotten == Forgotten(read=4, read_until=forgotten.read_until)
    assert desk.books.count("email_content") == 4
    assert desk.books.count("operator_audit") == 0
    for address in ("zoë@bücher.example", "ZOË@xn--bcher-kva.example"):
        finished(desk.books, to="Zoë <Zoë@bücher.example>")
        assert (await forget(desk.session, address)).emails == 1


async def test_unfinished_and_locked_emails_are_listed_and_left(desk: Desk) -> None:
    pending, sending, waiting = desk.books.enqueue(3, to=ANN)
    desk.books.change(sending, status="sending")
    desk.books.change(waiting, status="waiting", publish_due_at=None, wait_until=datetime.now(UTC) + timedelta(weeks=3))
    email_id = finished(desk.books)
    async with await connect_async(desk.url, name="locker") as locker, locker.transaction():
        await locker.execute("select 1 from dispatcher.email_log where email_id = %s for update", (email_id,))
        forgotten = await forget(desk.session)

    assert (forgotten.unfinished, forgotten.locked) == ([pending, sending, waiting], [email_id])
    assert (forgotten.emails, forgotten.is_complete, desk.books.count("email_content")) == (0, False, 4)
    assert (await forget(desk.session)).emails == 1


async def test_events_lose_the_address_also_without_content(desk: Desk) -> None:
    with_content, without = finished(desk.books), finished(desk.books)
    shared = finished(desk.books, to=["bob@example.com", ANN])
    for email_id in (with_content, without, shared):
        await report(desk.url, email_id, ANN)
    await report(desk.url, shared, "bob@example.com")
    desk.books.connection.execute("delete from email_content where email_id = %s", (without,))
    hasher = await AddressHasher.open(desk.session)
    desk.books.connection.execute("delete from outgoing_event")
    for address in (ANN, "bob@example.com"):
        desk.books.connection.execute(
            "insert into outgoing_event (kind, email_id, tenant_id, message_key, address_hash)"
            " values ('bounced', gen_random_uuid(), 'shop', 'key', %s)",
            (hasher.hash(address),),
        )

    forgotten = await forget(desk.session)

    assert (forgotten.emails, forgotten.contents, forgotten.events) == (3, 2, 4)
    feed = desk.books.connection.execute("select address_hash from outgoing_event").fetchall()
    assert {hashed and bytes(hashed) for (hashed,) in feed} == {None, hasher.hash("bob@example.com")}
    events = desk.books.connection.execute("select kind, address_hash, detail from email_event").fetchall()
    assert {(kind, detail) for kind, _, detail in events} == {("bounced", None)}
    kept = [bytes(hashed) for _, hashed, _ in events if hashed is not None]
    assert (len(events), kept) == (4, [hasher.hash("bob@example.com")])


@pytest.mark.parametrize("removes", [False, True], ids=["kept", "removed"])
async def test_a_suppression_is_removed_or_shows_no_address(desk: Desk, removes: bool) -> None:
    hasher = await AddressHasher.open(desk.session)
    entries = [
        Entry.of(Recipient.parse(text), hasher, SuppressionReason.MANUAL, "ann called", topic=topic)
        for text, topic in ((ANN, None), (ANN, "news"), ("bob@example.com", None), ("example.com", "news"))
    ]
    await insert_suppressions(desk.session, "shop", entries, actor="ann", reason="asked")

    forgotten = await forget(desk.session, removes_suppressions=removes)

    assert forgotten.suppressions == 2
    rows = desk.books.connection.execute("select address_hash, masked, note from suppression").fetchall()
    found = {bytes(hashed): (masked, note) for hashed, masked, note in rows}
    assert len(found) == (2 if removes else 4)
    of_ann = {hasher.hash(ANN), hash_with_topic(hasher.hash(ANN), "news")}
    assert {found.get(hashed) for hashed in of_ann} == {None if removes else (FORGOTTEN, None)}
    assert all(note == "ann called" for hashed, (_, note) in found.items() if hashed not in of_ann)


async def test_a_dry_run_and_a_second_run_change_nothing(desk: Desk) -> None:
    with_content, without = finished(desk.books), finished(desk.books)
    for email_id in (with_content, without):
        await report(desk.url, email_id, ANN)
    desk.books.connection.execute("delete from email_content where email_id = %s", (without,))
    before = texts_of(desk.books)

    counted = await Forgetting(desk.session, ANN, None).run()
    unchanged, forgotten, audited = texts_of(desk.books), await forget(desk.session), desk.books.count("operator_audit")
    again = await forget(desk.session, removes_suppressions=True)

    assert (unchanged, forgotten) == (before, counted)
    assert (again.emails, again.events, again.suppressions, again.is_complete) == (0, 0, 0, True)
    assert desk.books.count("operator_audit") == audited


async def test_pages_and_batches_cover_every_email(desk: Desk) -> None:
    for number in range(10):
        finished(desk.books, to=ANN if number % 3 else "bob@example.com")
    seen: list[int] = []

    forgotten = await Forgetting(desk.session, ANN, ACT, lambda done: seen.append(done.read), page=3, batch=2).run()

    assert (forgotten.emails, forgotten.read) == (6, 10)
    assert seen == sorted(seen)
