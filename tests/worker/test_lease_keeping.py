"""A worker renews a lease until its email is finished. After a worker has lost a lease, it does not send the email."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import OnUncertain
from dispatcher.providers.contract import Attempt
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import Outbox
from tests.broker.proxy import Proxy
from tests.recovery.tally import counted
from tests.store.books import Books
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider, accept, accept_when_let_go, answer, answer_when_let_go, never_leave

FAR = datetime(2100, 1, 1, tzinfo=UTC)
LEASE_SECONDS = "6"
"""The worker renews such a lease after two seconds, so four seconds remain if a busy machine stalls."""
LONGER_SECONDS = 6.5


def expired(books: Books) -> bool:
    return bool(books.select("select from email_log where status = 'sending' and locked_until < clock_timestamp()"))


async def test_the_leases_of_a_slow_send_and_of_a_waiting_email_are_renewed_again_and_again(bench: Bench) -> None:
    slow, waits = bench.books.enqueue(2)
    bench.provider.script[slow].append(accept_when_let_go)
    bench.provider.script[waits].append(answer(Deferred(Reason.REFUSED, retry_after=LONGER_SECONDS)))
    await bench.start(LEASE_SECONDS=LEASE_SECONDS, RETRY_CAP_SECONDS="7")
    await bench.deliver([slow, waits])
    await until(lambda: bench.provider.waiting and bench.books.outcomes(waits) == ["deferred"])
    seen: list[bool] = []
    ends: dict[UUID, set[datetime]] = {slow: set(), waits: set()}

    def is_sent() -> bool:
        seen.append(expired(bench.books))
        for email_id, found in ends.items():
            found.add(bench.books.row(email_id)["locked_until"])
        return bench.books.status(waits) == "sent"

    await until(is_sent)
    bench.provider.let_go()

    await bench.settled({"sent": 2})
    assert not any(seen)
    assert all(len(found) >= 3 for found in ends.values())  # of the retried email, None when no lease is left
    assert {row["lease_token"] for row in bench.books.rows()} == {1}


async def test_an_event_during_the_wait_for_a_retry_stops_the_retry(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=1.0))
    worker = await bench.start(RETRY_CAP_SECONDS="2")
    email_id, neighbour = await bench.enqueue(2)
    await until(lambda: all(bench.books.outcomes(each) == ["deferred"] for each in (email_id, neighbour)))
    bench.provider.always = accept

    bench.books.change(email_id, proven_by="sendgrid")

    await until(lambda: bench.books.status(neighbour) == "sent")
    # The worker renews the lease for the second attempt, and then releases the email.
    await until(lambda: bench.books.status(email_id) == "pending")
    await until(lambda: worker.in_flight == 0)
    assert bench.provider.accepted == {neighbour: 1}
    row = bench.books.row(email_id)
    assert (row["attempt_count"], row["proven_by"]) == (1, "sendgrid")


async def test_nothing_is_sent_under_a_lease_that_may_have_expired(bench: Bench, postgres: Proxy) -> None:
    refused: list[bool] = []

    async def leave_late(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        await provider.wait(email.email_id)
        try:
            attempt.mark_on_wire()
        except BaseException:
            refused.append(True)
            raise
        return provider.accept(email.email_id)

    _, (email_id,) = await bench.begin(1, leave_late, DATABASE_URL=postgres.url, LEASE_SECONDS="3")
    postgres.freeze()  # from here on, the worker cannot renew leases
    await until(lambda: expired(bench.books))
    bench.provider.let_go()
    await until(lambda: refused)
    postgres.cut()
    postgres.thaw()

    await until(lambda: bench.books.status(email_id) == "pending")
    assert bench.provider.accepted == {}
    row = bench.books.row(email_id)
    assert (row["attempt_count"], row["publish_due_at"] is None) == (0, False)
    await bench.deliver([email_id])
    await bench.settled({"sent": 1})
    assert bench.provider.accepted == {email_id: 1}


async def test_a_reconnected_worker_undoes_needless_recoveries(bench: Bench, postgres: Proxy, tables_url: str) -> None:
    on_the_wire: list[Outcome] = [Accepted(), Deferred(Reason.REFUSED), Rejected(Reason.REFUSED), Uncertain("silence")]
    waits = answer(Deferred(Reason.REFUSED, retry_after=50.0))
    ids = unbegun, waiting, accepted, *_ = bench.books.enqueue(6)
    for email_id, act in zip(ids, (never_leave, waits, *map(answer_when_let_go, on_the_wire)), strict=True):
        bench.provider.script[email_id].append(act)
    await bench.start(DATABASE_URL=postgres.url, LEASE_SECONDS="3", RETRY_CAP_SECONDS="60", MAX_ATTEMPTS="3")
    await bench.deliver(ids)
    await until(lambda: len(bench.provider.calls) == 6 and bench.books.outcomes(waiting) == ["deferred"])

    postgres.freeze()
    bench.books.connection.execute("update email_log set locked_until = '2026-01-01' where status = 'sending'")
    async with await connect_async(tables_url, name="leader") as session:
        outbox = Outbox(session)
        await outbox.recover_expired(OnUncertain.HOLD, 3, await outbox.find_expiring())
    assert bench.books.statuses() == {"held": 6}
    with counted() as counts:
        bench.provider.let_go()
        postgres.cut()
        postgres.thaw()
        await until(lambda: bench.books.statuses() == {"pending": 3, "sent": 1, "failed": 1, "held": 1})

    assert counts["lease_lost",] == 3  # all emails except the accepted one, which was recorded as evidence
    assert [bench.books.status(i) for i in ids] == ["pending", "pending", "sent", "pending", "failed", "held"]
    rows = [bench.books.row(email_id) for email_id in ids]
    assert [row["attempt_count"] - row["attempt_base"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert bench.books.count("operator_audit") == 4
    await bench.deliver([unbegun])
    bench.provider.script[unbegun].clear()
    await until(lambda: bench.books.status(unbegun) == "sent")
    assert bench.provider.accepted == {accepted: 1, unbegun: 1}
