"""Suppressed recipients get no email."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from uuid import UUID

import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.suppression import SuppressionReason
from dispatcher.errors import StoreUnavailable
from dispatcher.providers.contract import Attempt
from dispatcher.providers.sendgrid.request import headers_of
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import Pool
from dispatcher.store.suppressions import SuppressionReader, SuppressionsRead
from dispatcher.transport.mime import render
from dispatcher.worker.bulk_calls import with_bulk_calls
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.send import UnsubscribeHeaders
from dispatcher.worker.suppression import SuppressedRecipients
from tests.providers.emails import an_email
from tests.store.suppressing import hasher_of, suppress, unsuppress
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedBulk, ScriptedProvider, answer
from tests.worker.stage_bench import NobodySuppressed


class Recipients(ScriptedProvider):
    """Accepts every email, and remembers who got it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[UUID, tuple[Sequence[str], ...]] = {}
        self.headers: dict[UUID, dict[str, str]] = {}
        self.always = self._accept
        self.detail: str | None = None

    async def _accept(self, _: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Accepted:
        attempt.mark_on_wire()
        self.seen[email.email_id] = (email.to, email.cc, email.bcc)
        self.headers[email.email_id] = dict(email.headers)
        self.accept(email.email_id)
        return Accepted("id", self.detail)


async def test_an_email_to_suppressed_recipients_only_fails_without_a_dead_letter(bench: Bench) -> None:
    suppress(bench.books.connection, "ann@example.org")
    await bench.start()
    (email_id,) = await bench.enqueue(to="Ann <ANN@Example.org>")

    await bench.settled({"failed": 1})

    row = bench.books.row(email_id)
    assert (row["error_type"], row["dead_letter_due_at"], row["provider"]) == ("suppressed", None, "none")
    assert row["last_error"] == "Every recipient is suppressed: hard_bounce."
    assert bench.books.outcomes(email_id) == ["rejected"]
    assert bench.provider.calls == []
    await bench.nothing_left_on_the_queue()


async def test_a_suppressed_recipient_among_several_is_left_out_and_listed_like_a_refused_one(bench: Bench) -> None:
    provider = Recipients()
    provider.detail = "refused recipients: 2 (550 5.1.1); 250 queued"
    suppress(bench.books.connection, "ann@example.org", "eve@example.org")
    await bench.start([provider])
    (email_id,) = await bench.enqueue(
        to=["ann@example.org", "bob@example.org"], cc=["cem@example.org"], bcc=["eve@example.org"]
    )

    await bench.settled({"sent": 1})

    assert provider.seen[email_id] == (("bob@example.org",), ("cem@example.org",), ())
    assert bench.books.row(email_id)["last_error"] == (
        "refused recipients: 1 (suppressed: hard_bounce), 3 (550 5.1.1), 4 (suppressed: hard_bounce); 250 queued"
    )


async def test_a_suppressed_domain_suppresses_its_addresses_and_no_others(bench: Bench) -> None:
    suppress(bench.books.connection, "example.org")
    await bench.start()
    (suppressed,) = await bench.enqueue(to="Ann <ann@EXAMPLE.org>")
    await bench.enqueue(to="ann@mail.example.org")

    await bench.settled({"failed": 1, "sent": 1})

    assert bench.books.status(suppressed) == "failed"


async def test_entries_of_other_tenants_and_expired_entries_suppress_nobody(bench: Bench) -> None:
    suppress(bench.books.connection, "ann@example.org", tenant_id="other")
    suppress(bench.books.connection, "bob@example.org", expires_in="-1 second")
    await bench.start()
    await bench.enqueue(to=["ann@example.org", "bob@example.org"])

    await bench.settled({"sent": 1})

    assert bench.books.rows()[0]["last_error"] == "250 ok"


async def test_an_entry_of_another_tenant_costs_no_query(bench: Bench) -> None:
    suppress(bench.books.connection, "example.org", tenant_id="other")
    suppress(bench.books.connection, "eve@example.org")
    await bench.start()
    await bench.enqueue(tenant_id="other")
    await bench.enqueue(to="eve@example.org")
    await bench.settled({"failed": 2})  # the worker has read the entries
    (email_id,) = bench.books.enqueue(to="ann@example.org")

    bench.books.connection.execute("begin")
    bench.books.connection.execute("lock table suppression in access exclusive mode")
    await bench.deliver([email_id])

    await until(lambda: bench.books.status(email_id) == "sent")
    bench.books.connection.execute("rollback")


async def test_an_entry_counts_within_two_seconds_and_a_removal_at_once(bench: Bench) -> None:
    await bench.start()
    await bench.enqueue()
    await bench.settled({"sent": 1})
    suppress(bench.books.connection, "bob@example.org")

    async def is_suppressed() -> bool:
        (email_id,) = await bench.enqueue(to="bob@example.org")
        await until(lambda: bench.books.status(email_id) in ("sent", "failed"))
        return bench.books.status(email_id) == "failed"

    await until_answer(is_suppressed)
    unsuppress(bench.books.connection, "bob@example.org")

    assert not await is_suppressed()


class CountedReader(SuppressionReader):
    """Counts the reads of entries."""

    reads = 0

    async def read_all(self) -> SuppressionsRead:
        """See `SuppressionReader`."""
        self.reads += 1
        return await super().read_all()

    async def read_changed(self, since: str) -> SuppressionsRead:
        """See `SuppressionReader`."""
        self.reads += 1
        return await super().read_changed(since)


async def test_a_worker_without_emails_reads_no_entries_and_the_next_email_is_judged_by_a_query(
    bench: Bench, pool: Pool
) -> None:
    reader = CountedReader(pool)
    recipients = SuppressedRecipients(reader, StoreOutage(), idle_seconds=0.0)
    running = asyncio.create_task(recipients.run())
    await until(lambda: recipients.is_current)
    await until(lambda: not recipients.is_current)
    (email_id,) = bench.books.enqueue(to="bob@example.org")
    suppress(bench.books.connection, "bob@example.org")
    outgoing = dataclasses.replace(an_email(), email_id=email_id, to=("bob@example.org",))
    assert reader.reads == 1

    assert recipients.may_concern(outgoing, "default")
    assert await recipients.find(outgoing) == {1: SuppressionReason.HARD_BOUNCE}

    await until(lambda: recipients.is_current)
    assert reader.reads == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class LosableReader(NobodySuppressed):
    """Reads nothing while `is_lost`."""

    is_lost = False

    async def read_changed(self, since: str) -> SuppressionsRead:
        """See `SuppressionReader`."""
        if self.is_lost:
            raise StoreUnavailable("lost")
        return await super().read_changed(since)


async def test_while_the_entries_cannot_be_read_every_email_is_judged_by_a_query() -> None:
    reader = LosableReader()
    recipients = SuppressedRecipients(reader, StoreOutage())
    running = asyncio.create_task(recipients.run())
    await until(lambda: not recipients.may_concern(an_email(), "default"))

    reader.is_lost = True
    await until(lambda: recipients.may_concern(an_email(), "default"))

    reader.is_lost = False
    await until(lambda: not recipients.may_concern(an_email(), "default"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_recipient_who_was_suppressed_after_a_deferral_gets_no_second_attempt(bench: Bench) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.provider.script[email_id].append(answer(Deferred(Reason.SERVER_ERROR, "later", "451", 4.0)))
    await bench.start(RETRY_CAP_SECONDS="4")
    await bench.deliver([email_id])
    await until(lambda: len(bench.provider.calls) == 1)
    suppress(bench.books.connection, "ann@example.org")

    await bench.settled({"failed": 1})

    assert bench.books.row(email_id)["error_type"] == "suppressed"
    assert bench.books.outcomes(email_id) == ["deferred", "rejected"]


async def test_large_content_is_sent_without_suppressed_recipients(bench: Bench) -> None:
    provider = Recipients()
    suppress(bench.books.connection, "ann@example.org")
    await bench.start([provider])
    (email_id,) = await bench.enqueue(to=["ann@example.org", "bob@example.org"], text="x" * 200_000)
    (nobody,) = await bench.enqueue(to="ann@example.org", text="x" * 200_000)

    await bench.settled({"sent": 1, "failed": 1})

    assert provider.seen == {email_id: (("bob@example.org",), (), ())}
    assert bench.books.row(nobody)["error_type"] == "suppressed"


@pytest.mark.parametrize("bundled", [False, True])
async def test_bulk_calls_and_bundles_leave_out_suppressed_recipients(bench: Bench, bundled: bool) -> None:
    provider = ScriptedBulk()
    suppress(bench.books.connection, "eve@example.org")
    await bench.start([with_bulk_calls(provider, 50)])
    others = bench.books.enqueue(20)
    partly = bench.books.enqueue(5, to=["ann@example.org", "eve@example.org"])
    nobody = bench.books.enqueue(5, to="eve@example.org")
    ids = [*others, *nobody, *partly]

    await (bench.deliver_together(ids) if bundled else bench.deliver(ids))
    await bench.settled({"sent": 25, "failed": 5})

    assert provider.accepted == dict.fromkeys([*others, *partly], 1)
    assert {bench.books.row(each)["error_type"] for each in nobody} == {"suppressed"}


async def test_an_email_that_ignores_suppression_goes_to_everybody(bench: Bench) -> None:
    provider = Recipients()
    suppress(bench.books.connection, "ann@example.org")
    await bench.start([provider])
    (email_id,) = await bench.enqueue(to="ann@example.org", ignore_suppression=True)

    await bench.settled({"sent": 1})

    assert provider.seen[email_id][0] == ("ann@example.org",)


async def test_a_drain_releases_emails_whose_recipients_are_being_checked(bench: Bench) -> None:
    suppress(bench.books.connection, "ann@example.org")
    worker = await bench.start()
    (email_id,) = bench.books.enqueue()
    bench.books.connection.execute("begin")
    bench.books.connection.execute("lock table suppression in access exclusive mode")
    await bench.deliver([email_id])
    await until(lambda: bench.books.status(email_id) == "sending")

    await worker.stop()
    bench.books.connection.execute("rollback")

    row = bench.books.row(email_id)
    assert (row["status"], row["attempt_count"], bench.provider.calls) == ("pending", 0, [])


async def test_emails_of_configured_senders_to_one_recipient_get_the_unsubscribe_headers(bench: Bench) -> None:
    provider = Recipients()
    await bench.start(
        [provider], UNSUBSCRIBE_URL="https://mail.example.com/", UNSUBSCRIBE_SENDERS="example.com,news@example.net"
    )
    (one,) = await bench.enqueue()
    (large,) = await bench.enqueue(text="x" * 200_000)
    (two,) = await bench.enqueue(to=["ann@example.org", "bob@example.org"])
    (other,) = await bench.enqueue(sender="shop@example.net")
    (own,) = await bench.enqueue(headers={"List-Unsubscribe": "<mailto:stop@example.com>"})

    await bench.settled({"sent": 5})

    hasher = hasher_of(bench.books.connection)
    for email_id in (one, large):
        token = hasher.unsubscribe_token(email_id, "ann@example.org")
        assert hasher.read_unsubscribe_token(token) == (email_id, hasher.hash("ann@example.org"))
        assert provider.headers[email_id] == {
            "List-Unsubscribe": f"<https://mail.example.com/v1/unsubscribe/{token}>",
            "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
        }
    assert provider.headers[two] == provider.headers[other] == {}
    assert provider.headers[own] == {"List-Unsubscribe": "<mailto:stop@example.com>"}


def test_a_long_unsubscribe_header_is_not_encoded() -> None:
    hasher = AddressHasher(b"k" * 32)
    headers = UnsubscribeHeaders("https://a-rather-long-name-of-a-host.mail.example.com", ["example.com"])
    email = headers.added_to(an_email(sender="shop@example.com", to=("ann@example.org",)), hasher)

    lines = bytes(render(email).body).replace(b"\r\n ", b"").split(b"\r\n")  # unfolded

    assert f"List-Unsubscribe: {email.headers['List-Unsubscribe']}".encode() in lines
    assert headers_of(email)["List-Unsubscribe"] == email.headers["List-Unsubscribe"]
    assert b"List-Unsubscribe-Post: List-Unsubscribe=One-Click" in lines
