"""Suppressed recipients get no email."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple
from uuid import UUID

import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.suppression import SuppressionReason
from dispatcher.errors import StoreUnavailable
from dispatcher.providers.contract import Attempt
from dispatcher.store.connections import Pool
from dispatcher.store.suppressions import SuppressionReader, SuppressionsRead
from dispatcher.worker.bulk_calls import with_bulk_calls
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.suppression import SuppressedRecipients
from tests.providers.emails import an_email
from tests.store.suppressing import hasher_of, suppress, unsuppress
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedBulk, ScriptedProvider, answer_when_let_go
from tests.worker.stage_bench import NobodySuppressed

DETAIL = "refused recipients: 2 (550 5.1.1); 250 queued"
Seen = tuple[Sequence[str], ...]


class Recipients(ScriptedProvider):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[UUID, Seen] = {}
        self.headers: dict[UUID, dict[str, str]] = {}
        self.raws: list[bytes] = []
        self.always = self._accept

    async def _accept(self, _: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Accepted:
        attempt.mark_on_wire()
        self.seen[email.email_id] = (email.to, email.cc, email.bcc)
        self.headers[email.email_id] = dict(email.headers)
        if email.raw is not None:
            self.raws.append(email.raw)
        self.accept(email.email_id)
        return Accepted("id", DETAIL if email.bcc or email.cc else "250 ok")


ANN, BOB, CEM, DAN, EVE = (f"{name}@example.org" for name in ("ann", "bob", "cem", "dan", "eve"))
LARGE = "x" * 200_000
SIGNED = b"From: shop@example.com\r\nTo: list@example.org\r\nContent-Type: application/pkcs7-mime\r\n\r\nMTIz\r\n"
FAILED: Final = "Every recipient is suppressed: hard_bounce."
PARTLY: Final = (
    "refused recipients: 1 (suppressed: hard_bounce), 3 (550 5.1.1), 4 (suppressed: hard_bounce); 250 queued"
)
FIRST_LEFT_OUT: Final = "refused recipients: 1 (suppressed: hard_bounce); 250 ok"


class Case(NamedTuple):
    fields: dict[str, Any]
    seen: Seen | None
    text: str


CASES: Final = {
    "only suppressed": Case({"to": "Ann <ANN@Example.org>"}, None, FAILED),
    "several": Case({"to": [ANN, BOB], "cc": [CEM], "bcc": [EVE]}, ((BOB,), (CEM,), ()), PARTLY),
    "domain": Case({"to": "Ann <ann@SHOP.example>"}, None, FAILED),
    "subdomain": Case({"to": "ann@mail.shop.example"}, (("ann@mail.shop.example",), (), ()), "250 ok"),
    "of another tenant": Case({"to": CEM}, ((CEM,), (), ()), "250 ok"),
    "expired": Case({"to": BOB}, ((BOB,), (), ()), "250 ok"),
    "large": Case({"to": [ANN, BOB], "text": LARGE}, ((BOB,), (), ()), FIRST_LEFT_OUT),
    "large, only suppressed": Case({"to": ANN, "text": LARGE}, None, FAILED),
    "left topic": Case({"to": DAN, "topic": "news"}, None, FAILED),
    "left topic, large": Case({"to": DAN, "topic": "news", "text": LARGE}, None, FAILED),
    "left topic, by the domain": Case({"to": "ann@club.example", "topic": "news"}, None, FAILED),
    "another topic": Case(
        {"to": [DAN, "ann@club.example"], "topic": "offers"}, ((DAN, "ann@club.example"), (), ()), "250 ok"
    ),
    "no topic": Case({"to": [DAN, "ann@club.example"]}, ((DAN, "ann@club.example"), (), ()), "250 ok"),
    "any topic": Case({"to": [ANN, BOB], "topic": "offers"}, ((BOB,), (), ()), FIRST_LEFT_OUT),
    "ignored": Case({"to": ANN, "ignore_suppression": True}, ((ANN,), (), ()), "250 ok"),
}


async def test_suppressed_recipients_are_left_out_and_listed_like_refused_ones(bench: Bench) -> None:
    provider = Recipients()
    suppress(bench.books.connection, ANN, EVE, "shop.example")
    suppress(bench.books.connection, CEM, tenant_id="other")
    suppress(bench.books.connection, DAN, "club.example", topic="news")
    suppress(bench.books.connection, BOB, expires_in="-1 second")
    email_ids = {bench.books.enqueue_one(**case.fields): name for name, case in CASES.items()}
    await bench.start([provider])

    await bench.deliver(email_ids)

    failed = sum(case.seen is None for case in CASES.values())
    await bench.settled({"sent": len(CASES) - failed, "failed": failed})
    rows = {email_ids[row["email_id"]]: row for row in bench.books.rows()}
    seen = {email_ids[email_id]: people for email_id, people in provider.seen.items()}
    assert seen == {name: case.seen for name, case in CASES.items() if case.seen is not None}
    assert {name: row["last_error"] for name, row in rows.items()} == {name: case.text for name, case in CASES.items()}
    for email_id, name in email_ids.items():
        if CASES[name].seen is None:
            row = rows[name]
            assert (row["error_type"], row["dead_letter_due_at"], row["provider"]) == ("suppressed", None, "none")
            assert bench.books.outcomes(email_id) == ["rejected"]
    await bench.nothing_left_on_the_queue()


async def is_suppressed(bench: Bench, address: str) -> bool:
    (email_id,) = await bench.enqueue(to=address)
    await until(lambda: bench.books.status(email_id) in ("sent", "failed"))
    return bench.books.status(email_id) == "failed"


async def test_an_entry_counts_within_two_seconds_and_a_removal_at_once(bench: Bench) -> None:
    await bench.start()
    await bench.enqueue()
    await bench.settled({"sent": 1})
    suppress(bench.books.connection, BOB)

    await until_answer(lambda: is_suppressed(bench, BOB))
    unsuppress(bench.books.connection, BOB)

    assert not await is_suppressed(bench, BOB)


@asynccontextmanager
async def running(recipients: SuppressedRecipients) -> AsyncIterator[None]:
    task = asyncio.create_task(recipients.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class CountedReader(SuppressionReader):
    reads = 0

    async def read_all(self) -> SuppressionsRead:
        self.reads += 1
        return await super().read_all()

    async def read_changed(self, since: str) -> SuppressionsRead:
        self.reads += 1
        return await super().read_changed(since)


async def test_an_idle_worker_reads_no_entries_and_judges_the_next_email_by_a_query(bench: Bench, pool: Pool) -> None:
    reader = CountedReader(pool)
    recipients = SuppressedRecipients(reader, StoreOutage(), idle_seconds=0.0)
    async with running(recipients):
        await until(lambda: recipients.is_current)
        await until(lambda: not recipients.is_current)
        (email_id,) = bench.books.enqueue(to=BOB)
        suppress(bench.books.connection, BOB)
        outgoing = replace(an_email(), email_id=email_id, to=(BOB,))
        assert reader.reads == 1

        assert recipients.may_concern(outgoing, "default", None)
        assert await recipients.find(outgoing, None) == {1: SuppressionReason.HARD_BOUNCE}

        await until(lambda: recipients.is_current)
        assert reader.reads == 2


class LosableReader(NobodySuppressed):
    is_lost = False

    async def read_changed(self, since: str) -> SuppressionsRead:
        if self.is_lost:
            raise StoreUnavailable("lost")
        return await super().read_changed(since)


async def test_while_the_entries_cannot_be_read_every_email_is_judged_by_a_query() -> None:
    reader = LosableReader()
    recipients = SuppressedRecipients(reader, StoreOutage())
    async with running(recipients):
        for is_lost in (False, True, False):
            reader.is_lost = is_lost
            await until(lambda: recipients.may_concern(an_email(), "default", None) is reader.is_lost)


async def test_a_recipient_who_was_suppressed_after_a_deferral_gets_no_second_attempt(bench: Bench) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.provider.script[email_id].append(answer_when_let_go(Deferred(Reason.SERVER_ERROR, "later", "451")))
    await bench.start()
    await bench.deliver([email_id])
    await until(lambda: bench.provider.waiting)
    suppress(bench.books.connection, ANN)
    await until_answer(lambda: is_suppressed(bench, ANN))
    bench.provider.let_go()

    await until(lambda: bench.books.status(email_id) == "failed")

    assert bench.books.row(email_id)["error_type"] == "suppressed"
    assert bench.books.outcomes(email_id) == ["deferred", "rejected"]


@pytest.mark.parametrize("bundled", [False, True])
async def test_bulk_calls_and_bundles_leave_out_suppressed_recipients(bench: Bench, bundled: bool) -> None:
    provider = ScriptedBulk()
    suppress(bench.books.connection, EVE)
    await bench.start([with_bulk_calls(provider, 50)])
    others = bench.books.enqueue(20)
    partly = bench.books.enqueue(5, to=[ANN, EVE])
    nobody = bench.books.enqueue(5, to=EVE)
    ids = [*others, *nobody, *partly]

    await (bench.deliver_together(ids) if bundled else bench.deliver(ids))
    await bench.settled({"sent": 25, "failed": 5})

    assert provider.accepted == dict.fromkeys([*others, *partly], 1)
    assert {bench.books.row(each)["error_type"] for each in nobody} == {"suppressed"}


async def test_a_drain_releases_emails_whose_recipients_are_being_checked(bench: Bench) -> None:
    suppress(bench.books.connection, ANN)
    worker = await bench.start()
    (email_id,) = bench.books.enqueue()
    with bench.books.connection.transaction():
        bench.books.connection.execute("lock table suppression in access exclusive mode")
        await bench.deliver([email_id])
        await until(lambda: bench.books.status(email_id) == "sending")

        await worker.stop()

    row = bench.books.row(email_id)
    assert (row["status"], row["attempt_count"], bench.provider.calls) == ("pending", 0, [])


async def test_emails_of_configured_senders_to_one_recipient_get_the_unsubscribe_headers(bench: Bench) -> None:
    provider = Recipients()
    await bench.start(
        [provider], UNSUBSCRIBE_URL="https://mail.example.com/", UNSUBSCRIBE_SENDERS="example.com,news@example.net"
    )
    (one,) = await bench.enqueue()
    (large,) = await bench.enqueue(text=LARGE)
    (two,) = await bench.enqueue(to=[ANN, BOB])
    (other,) = await bench.enqueue(sender="shop@example.net")
    (own,) = await bench.enqueue(headers={"List-Unsubscribe": "<mailto:stop@example.com>"})
    (raw,) = await bench.enqueue(raw=SIGNED, text=None)
    dkim = b"DKIM-Signature: v=1; d=example.com;\r\n h=from : list-unsubscribe ;\r\n b=YQ==\r\n" + SIGNED
    (signed_without,) = await bench.enqueue(raw=dkim, text=None)
    (own_raw,) = await bench.enqueue(raw=b"List-Unsubscribe: <mailto:stop@example.com>\r\n" + SIGNED, text=None)

    await bench.settled({"sent": 8})

    hasher = hasher_of(bench.books.connection)
    for email_id in (one, large, raw):
        token = hasher.unsubscribe_token(email_id, ANN)
        assert hasher.read_unsubscribe_token(token) == (email_id, hasher.hash(ANN))
        assert provider.headers[email_id] == {
            "List-Unsubscribe": f"<https://mail.example.com/v1/unsubscribe/{token}>",
            "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
        }
    assert [provider.headers[each] for each in (two, other, own_raw, signed_without)] == [{}] * 4
    assert provider.raws == [SIGNED, dkim, b"List-Unsubscribe: <mailto:stop@example.com>\r\n" + SIGNED]
    assert provider.headers[own] == {"List-Unsubscribe": "<mailto:stop@example.com>"}


async def test_a_raw_email_with_a_suppressed_recipient_goes_to_the_others_only(bench: Bench) -> None:
    suppress(bench.books.connection, BOB)
    provider = Recipients()
    await bench.start([provider])
    (some,) = await bench.enqueue(raw=SIGNED, text=None, to=[ANN], bcc=[BOB])
    (none,) = await bench.enqueue(raw=SIGNED, text=None, to=[BOB])

    await bench.settled({"sent": 1, "failed": 1})

    assert provider.seen == {some: ((ANN,), (), ())}
    assert bench.books.row(none)["error_type"] == "suppressed"
    assert provider.raws == [SIGNED]
