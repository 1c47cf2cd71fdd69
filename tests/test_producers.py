"""Enqueueing: an email is stored completely or not at all, in the caller's transaction, and once per message key.

What both functions implement is tested for the synchronous and for the `_async` functions; what statements do, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row, namedtuple_row, tuple_row

from dispatcher import (
    Acceptance,
    Attachment,
    Calendar,
    Email,
    Enqueued,
    InvalidEmail,
    MessageKeyConflict,
    Sms,
    enqueue,
    enqueue_async,
    enqueue_many,
    enqueue_many_async,
)
from dispatcher.producers import BATCH_EMAILS, sms_rules
from tests.mime_corpus import ics
from tests.store.books import NEXT_YEAR, Books, email
from tests.waiting import until, wait_until

ACCEPTED, KNOWN, CONFLICT = Acceptance.ACCEPTED, Acceptance.KNOWN, Acceptance.CONFLICT
TABLES = ("email_log", "email_content", "email_attachment", "email_idempotency")
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
FILE = Attachment("a.bin", "application/octet-stream", bytes(range(256)))


@dataclass(frozen=True)
class Way:
    twin: bool
    autocommit: bool = False
    rows: Any = tuple_row


class Application:
    def __init__(self, connection: Any, *, twin: bool) -> None:
        self._connection = connection
        self._twin = twin

    async def enqueue(self, one: Email, **options: Any) -> Enqueued:
        if self._twin:
            return await enqueue_async(self._connection, one, **options)
        return enqueue(self._connection, one, **options)

    async def enqueue_many(self, emails: Iterable[Email], **options: Any) -> list[Enqueued]:
        if self._twin:
            return await enqueue_many_async(self._connection, emails, **options)
        return enqueue_many(self._connection, emails, **options)

    async def commit(self) -> None:
        await self._ended(self._connection.commit())

    async def execute(self, statement: str) -> None:
        await self._ended(self._connection.execute(statement.encode()))

    async def _ended(self, answer: Any) -> None:
        if self._twin:
            await answer


@pytest.fixture(params=[Way(False), Way(True)], ids=["sync", "async"])
def way(request: pytest.FixtureRequest) -> Way:
    assert isinstance(request.param, Way)
    return request.param


@pytest.fixture
async def application(way: Way, tables_url: str) -> AsyncIterator[Application]:
    options: dict[str, Any] = {"autocommit": way.autocommit, "row_factory": way.rows, "application_name": "application"}
    if way.twin:
        async with await psycopg.AsyncConnection.connect(tables_url, **options) as opened:
            yield Application(opened, twin=True)
    else:
        with psycopg.connect(tables_url, **options) as connection:
            yield Application(connection, twin=False)


once = pytest.mark.parametrize("way", [Way(False)], ids=["sync"])
in_autocommit = pytest.mark.parametrize("way", [Way(False, True), Way(True, True)], ids=["sync", "async"])


def row_counts(books: Books) -> dict[str, int]:
    return {table: books.count(table) for table in TABLES}


NOTHING = dict.fromkeys(TABLES, 0)


async def test_an_email_is_visible_after_the_commit_and_not_before(application: Application, books: Books) -> None:
    answer = await application.enqueue(email("key", attachments=[FILE]))

    assert (answer.message_key, answer.acceptance) == ("key", ACCEPTED)
    assert row_counts(books) == NOTHING
    await application.commit()
    assert row_counts(books) == dict.fromkeys(TABLES, 1)
    row = books.row(answer.email_id)
    assert (row["status"], row["message_key"], row["attempt_count"]) == ("pending", "key", 0)
    assert (row["tenant_id"], row["published_at"]) == ("default", None)
    assert row["publish_due_at"] is not None


@once
async def test_a_rollback_to_a_savepoint_leaves_nothing_and_frees_keys(application: Application, books: Books) -> None:
    await application.enqueue(email("before"))
    await application.execute("savepoint here")
    first = await application.enqueue(email("key", attachments=[FILE]))
    await application.execute("rollback to savepoint here")
    second = await application.enqueue(email("key", subject="Another payload"))
    await application.commit()

    assert (second.acceptance, second.email_id != first.email_id) == (ACCEPTED, True)
    assert row_counts(books) == {"email_log": 2, "email_content": 2, "email_attachment": 0, "email_idempotency": 2}


async def test_the_same_key_and_payload_again_store_nothing(application: Application, books: Books) -> None:
    first = await application.enqueue(email("key", attachments=[FILE]))
    await application.commit()

    again = await application.enqueue(email("key", attachments=[FILE], correlation_id="another request"))
    await application.commit()

    assert again == Enqueued(first.email_id, "key", KNOWN)
    assert row_counts(books) == dict.fromkeys(TABLES, 1)


async def test_the_same_key_with_another_payload_is_a_conflict_after_which_the_transaction_can_continue(
    application: Application, books: Books
) -> None:
    first = await application.enqueue(email("key"))

    with pytest.raises(MessageKeyConflict, match="'key' already belongs to") as conflict:
        await application.enqueue(email("key", subject="Another"))
    await application.enqueue(email("other key"))
    await application.commit()

    assert (conflict.value.email_id, conflict.value.tenant_id) == (str(first.email_id), "default")
    assert [row["message_key"] for row in books.rows()] == ["key", "other key"]


@once
async def test_an_expired_email_is_refused_unless_enqueued_in_time(application: Application, books: Books) -> None:
    expires_at = datetime.now(UTC) + timedelta(seconds=1)
    first = await application.enqueue(email("key", expires_at=expires_at))
    await application.commit()
    await until(lambda: datetime.now(UTC) > expires_at)

    assert await application.enqueue(email("key", expires_at=expires_at)) == Enqueued(first.email_id, "key", KNOWN)
    with pytest.raises(InvalidEmail, match="expires_at: is in the past"):
        await application.enqueue(email("new key", expires_at=expires_at))
    answers = await application.enqueue_many(
        [email("new key", expires_at=expires_at), email("other")], report_conflicts=True
    )
    await application.commit()

    assert [answer.acceptance for answer in answers] == [Acceptance.EXPIRED, ACCEPTED]
    assert {row["message_key"] for row in books.rows()} == {"key", "other"}
    assert books.count("email_idempotency") == 2


@once
async def test_a_scheduled_email_waits_and_wakes_no_relay(application: Application, books: Books) -> None:
    send_at = datetime.now(UTC) + timedelta(days=3)
    books.connection.execute("listen email_dispatcher_due")

    answer = await application.enqueue(email("key", send_at=send_at, lane="bulk"))
    await application.commit()

    row = books.row(answer.email_id)
    assert (row["status"], row["wait_until"], row["due_since"], row["lane"]) == ("waiting", send_at, send_at, "bulk")
    assert row["publish_due_at"] is None
    assert list(books.connection.notifies(timeout=0)) == []


async def test_with_reported_conflicts_the_other_emails_are_stored(application: Application, books: Books) -> None:
    (held,) = await application.enqueue_many([email("1")])

    answers = await application.enqueue_many(
        [email("0"), email("1", subject="Another"), email("1"), email("2")], report_conflicts=True
    )
    await application.commit()

    assert [answer.message_key for answer in answers] == ["0", "1", "1", "2"]
    assert [answer.acceptance for answer in answers] == [ACCEPTED, CONFLICT, KNOWN, ACCEPTED]
    assert answers[1].email_id == answers[2].email_id == held.email_id
    assert row_counts(books)["email_log"] == 3


@once
async def test_a_key_twice_in_a_batch_stores_the_first_email(application: Application, books: Books) -> None:
    emails = [email("a"), *(email("key", subject=subject) for subject in ("First", "Other", "First"))]
    another = email("key", tenant_id="another")  # a key belongs to its tenant

    *answers, other = await application.enqueue_many([*emails, another], report_conflicts=True)
    await application.commit()

    assert [answer.acceptance for answer in answers] == [ACCEPTED, ACCEPTED, CONFLICT, KNOWN]
    assert len({answer.email_id for answer in answers[1:]}) == 1
    assert (other.acceptance, other.email_id == answers[1].email_id) == (ACCEPTED, False)
    assert books.select("select subject from email_content where email_id = %s", answers[1].email_id) == [
        {"subject": "First"}
    ]


async def test_a_key_in_two_batches_is_known_the_second_time(application: Application, books: Books) -> None:
    emails = [email(str(number % BATCH_EMAILS)) for number in range(BATCH_EMAILS + 3)]

    answers = await application.enqueue_many(iter(emails))

    assert [answer.acceptance for answer in answers] == [ACCEPTED] * BATCH_EMAILS + [KNOWN] * 3
    assert [answer.email_id for answer in answers[-3:]] == [answer.email_id for answer in answers[:3]]


@pytest.mark.parametrize("count", [0, 1, 2 * BATCH_EMAILS + 1])
async def test_results_are_in_the_order_of_the_emails_for_any_size(
    application: Application, books: Books, count: int
) -> None:
    keys = [f"{(number * 7919) % 10007:05}" for number in range(count)]

    answers = await application.enqueue_many(email(key) for key in keys)
    await application.commit()

    ids = [answer.email_id for answer in answers]
    assert ids == sorted(ids)
    assert [answer.message_key for answer in answers] == keys
    assert {row["email_id"]: row["message_key"] for row in books.rows()} == {
        answer.email_id: answer.message_key for answer in answers
    }


@once
async def test_every_field_is_stored_unchanged(application: Application, books: Books) -> None:
    files = [Attachment(f"{n}-größe.bin", "a/b", bytes([n]) * n * 1000) for n in range(4)]
    given = email(
        "schlüssel-🦊",
        sender="Shöp <shop@example.com>",
        to=["Ann <ann@exämple.org>", "bob@example.org"],
        bcc="bcc@example.org",
        subject="漢字 “subject” \\ %s {} ' $1",
        text='NULL \\N {"a": 1} 🦊\n',
        html="<p>é</p>",
        headers={"X-One": 'a,b;c="d"'},
        tags=["a,b", "{}", "NULL", ""][:3],
        attachments=files,
        correlation_id="NULL",
        on_uncertain="resend",
    )

    await application.enqueue(given)
    await application.commit()

    (content,) = books.select(
        'select sender as "from", recipients, subject, text_body as text, html_body as html, headers, tags,'
        " attachment_count, message_key, correlation_id, on_uncertain"
        " from email_content join email_log using (email_id)"
    )
    recipients, count = content.pop("recipients"), content.pop("attachment_count")
    document = given.to_json()
    assert (recipients, count) == ({"to": list(given.to), "bcc": list(given.bcc)}, 4)
    assert content == {name: document[name] for name in content}
    kept = books.select("select filename, content_type, content from email_attachment order by position")
    assert [Attachment(**row) for row in kept] == files


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"sender": "Otp <OTP@example.com>"},  # a rule for the address
    {"sender": "any@Sub.example.com", "to": ["Ann <ann@exämple.org>", "b@x.example"], "bcc": "{o'neil}@x.example"},
    {"sender": "otp@example.com", "lane": "normal", "tenant_id": "NULL", "correlation_id": '{"}', "subject": ""},
    {"sender": "S <s@sub.example.com>", "html": "<p>é</p>\n", "headers": {"X-One": 'a,b;c="d"'}},
    {
        "tags": ["{}", '"', "\\"],
        "metadata": {"a": '{}"\\'},
        "on_uncertain": "resend",
        "ignore_suppression": True,
        "expires_at": NEXT_YEAR,
    },
    {"send_at": NEXT_YEAR, "attachments": [FILE]},
    {"html": '<img src="cid:a">', "attachments": [replace(FILE, content_id="a"), FILE], "calendar": Calendar(ics())},
    {"raw": b"From: shop@example.com\r\n\r\n{\xff}\r\n", "text": None},
    {"template_id": "t-1", "template_data": {"a": {"b": ["\n", None]}}, "text": None, "subject": ""},
)


@once
async def test_an_email_is_stored_alone_as_it_is_stored_in_a_batch(application: Application, books: Books) -> None:
    books.connection.execute(
        "insert into lane_rule (sender, lane) values ('otp@example.com', 'urgent'), ('@sub.example.com', 'bulk')"
    )

    def stored(answer: Enqueued) -> list[dict[str, Any]]:
        own = {"email_id", "message_key", "created_at", "publish_due_at"}
        found = [
            row
            for table in (*TABLES, "email_recipient")
            for row in books.select(f"select * from {table} where email_id = %s order by 2", answer.email_id)  # noqa: S608
        ]
        return [{name: value for name, value in row.items() if name not in own} for row in found]

    for number, fields in enumerate(KINDS):
        alone = await application.enqueue(email(f"alone-{number}", **fields), traceparent=TRACEPARENT)
        batch = [email(f"first-{number}"), email(f"in a batch-{number}", **fields)]
        _, among = await application.enqueue_many(batch, traceparent=TRACEPARENT)
        await application.commit()

        assert stored(alone) == stored(among), fields
        assert len(stored(alone)) > 3


@pytest.mark.parametrize(
    "way", [Way(*each) for each in product((False, True), (False, True), (dict_row, namedtuple_row))]
)
async def test_an_email_and_its_attachments_are_stored_together_on_every_kind_of_connection(
    application: Application, books: Books
) -> None:
    answers = await application.enqueue_many([email("1", attachments=[FILE, FILE]), email("2")])
    again = await application.enqueue_many([email("1", attachments=[FILE, FILE])])
    await application.commit()

    assert [answer.acceptance for answer in (*answers, *again)] == [ACCEPTED, ACCEPTED, KNOWN]
    assert row_counts(books) == {"email_log": 2, "email_content": 2, "email_attachment": 2, "email_idempotency": 2}


def test_emails_are_enqueued_in_a_pipeline(books: Books) -> None:
    with books.connection.pipeline():
        enqueue(books.connection, email("known"))
        answers = enqueue_many(books.connection, [email("known"), email("new", attachments=[FILE]), email("third")])

    assert [answer.acceptance for answer in answers] == ["known", "accepted", "accepted"]
    assert books.select("select filename from email_attachment") == [{"filename": FILE.filename}]


@in_autocommit
async def test_in_autocommit_a_failed_attachment_stores_no_email(
    application: Application, tables_url: str, books: Books
) -> None:
    with psycopg.connect(tables_url) as person:
        person.execute("lock table email_attachment in access exclusive mode")
        await application.execute("select set_config('lock_timeout', '50ms', false)")

        with pytest.raises(psycopg.errors.LockNotAvailable):
            await application.enqueue(email("key", attachments=[FILE]))

    assert row_counts(books) == NOTHING


LARGE = [email("large", text="x" * 9_000_000), email("larger", attachments=[Attachment("l", "a/b", bytes(12_000_000))])]


@in_autocommit
@pytest.mark.parametrize(
    "others",
    [[email("new")], [email(str(number)) for number in range(BATCH_EMAILS + 1)], LARGE],
    ids=["in one batch", "in a later batch", "after a large email"],
)
async def test_in_autocommit_a_conflict_among_many_emails_stores_none(
    application: Application, books: Books, others: list[Email]
) -> None:
    await application.enqueue(email("key"))

    with pytest.raises(MessageKeyConflict):
        await application.enqueue_many([*others, email("key", subject="Another"), email("newer")])

    assert [row["message_key"] for row in books.rows()] == ["key"]


class TestRaces:
    """Two transactions enqueue the same key. The second transaction waits until the first transaction ends."""

    @pytest.fixture
    def first(self, tables_url: str) -> Any:
        with psycopg.connect(tables_url) as connection:
            answer = enqueue(connection, email("key"))
            yield connection, answer

    @staticmethod
    def race(tables_url: str, books: Books, second: Email, end: Any, **connecting: Any) -> Enqueued:
        def enqueue_second() -> Enqueued:
            with psycopg.connect(tables_url, application_name="second", **connecting) as connection:
                return enqueue(connection, second)

        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(enqueue_second)
            wait_until(lambda: books.waiting_for_a_lock("second"))
            end()
            return answer.result(20)

    @pytest.mark.parametrize(
        ("ending", "acceptance"), [("commit", KNOWN), ("rollback", ACCEPTED)], ids=["commit", "rollback"]
    )
    def test_the_second_gets_the_id_of_the_first_only_if_the_first_commits(
        self, first: Any, tables_url: str, books: Books, ending: str, acceptance: Acceptance
    ) -> None:
        connection, held = first

        answer = self.race(tables_url, books, email("key"), getattr(connection, ending))

        assert (answer.acceptance, answer.email_id == held.email_id) == (acceptance, acceptance is KNOWN)
        assert [row["email_id"] for row in books.rows()] == [answer.email_id]

    def test_after_the_first_commits_another_payload_the_second_conflicts(
        self, first: Any, tables_url: str, books: Books
    ) -> None:
        connection, _ = first

        with pytest.raises(MessageKeyConflict):
            self.race(tables_url, books, email("key", subject="Another"), connection.commit)

    def test_under_repeatable_read_the_second_gets_a_serialization_failure(
        self, first: Any, tables_url: str, books: Books
    ) -> None:
        connection, held = first
        options = "-c default_transaction_isolation=repeatable\\ read"

        with pytest.raises(psycopg.errors.SerializationFailure):
            self.race(tables_url, books, email("key"), connection.commit, options=options)

        with psycopg.connect(tables_url, options=options) as again:
            assert enqueue(again, email("key")) == Enqueued(held.email_id, "key", KNOWN)

    def test_two_with_the_same_keys_in_opposite_order_do_not_deadlock(self, tables_url: str, books: Books) -> None:
        keys = [f"key-{number:03}" for number in range(200)]

        def run(order: list[str]) -> list[Acceptance]:
            with psycopg.connect(tables_url) as connection:
                return [answer.acceptance for answer in enqueue_many(connection, map(email, order))]

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(run, [keys, keys[::-1], keys, keys[::-1]]))

        assert sorted(answer.count(ACCEPTED) for answer in answers) == [0, 0, 0, 200]
        assert row_counts(books)["email_log"] == 200

    async def test_the_async_function_does_not_block_the_loop(self, first: Any, tables_url: str, books: Books) -> None:
        connection, held = first
        async with await psycopg.AsyncConnection.connect(tables_url, application_name="second") as second:
            waiting = asyncio.create_task(enqueue_async(second, email("key")))
            await until(lambda: books.waiting_for_a_lock("second"))
            connection.commit()

            assert await asyncio.wait_for(waiting, 20) == Enqueued(held.email_id, "key", KNOWN)


@once
async def test_a_commit_notifies_the_relay_once_and_of_no_known_key(application: Application, tables_url: str) -> None:
    with psycopg.connect(tables_url, autocommit=True) as relay:
        relay.execute("listen email_dispatcher_due")
        await application.enqueue_many([email("1"), email("2")])
        assert list(relay.notifies(timeout=0.02)) == []
        await application.commit()
        assert [each.channel for each in relay.notifies(timeout=10, stop_after=1)] == ["email_dispatcher_due"]

        await application.enqueue(email("1"))
        await application.commit()
        assert list(relay.notifies(timeout=0.05)) == []


@once
async def test_large_emails_are_stored_in_small_batches(application: Application, books: Books) -> None:
    large = Attachment("large.bin", "a/b", bytes(6_000_000))

    answers = await application.enqueue_many([email(str(number), attachments=[large]) for number in range(5)])
    await application.commit()

    # Rows that one statement inserts have the same command id.
    commands = books.select("select cmin::text as command, count(*) as emails from email_log group by cmin")
    assert sorted(row["emails"] for row in commands) == [1, 2, 2]
    assert [answer.message_key for answer in answers] == ["0", "1", "2", "3", "4"]


@once
async def test_an_invalid_traceparent_is_dropped(application: Application, books: Books) -> None:
    for number, given in enumerate((TRACEPARENT, TRACEPARENT.upper(), f"{TRACEPARENT}\n", "", "x" * 200_000, "\0")):
        await application.enqueue(email(str(number)), traceparent=given)
    await application.commit()

    assert [row["traceparent"] for row in books.rows()] == [TRACEPARENT, *[None] * 5]


@pytest.mark.parametrize(("session", "commit"), [("off", "on"), ("on", "on"), ("remote_apply", "remote_apply")])
def test_the_commit_of_an_enqueue_waits_for_the_disk(books: Books, session: str, commit: str) -> None:
    books.connection.execute("select set_config('synchronous_commit', %s, false)", [session])
    show = "select current_setting('synchronous_commit')"

    with books.connection.transaction():
        enqueue(books.connection, email("order-1"))
        within = books.connection.execute(show).fetchone()

    assert within == (commit,)
    assert books.connection.execute(show).fetchone() == (session,)


def test_an_application_that_has_the_setting_enqueues_no_sms_to_another_country(
    monkeypatch: pytest.MonkeyPatch, tables_session: psycopg.Connection
) -> None:
    german, austrian = (Sms(message_key=to, to=to, text="t") for to in ("+4915112345678", "+436641234567"))
    assert enqueue(tables_session, austrian).acceptance is ACCEPTED, "without the setting, the workers decide"
    monkeypatch.setenv("DISPATCHER_SMS_COUNTRIES", "DE")
    sms_rules.cache_clear()  # an application reads the setting once
    try:
        assert enqueue(tables_session, german).acceptance is ACCEPTED
        with pytest.raises(InvalidEmail, match="to: is a number of AT, which DISPATCHER_SMS_COUNTRIES"):
            enqueue_many(tables_session, [german, austrian])
    finally:
        sms_rules.cache_clear()
