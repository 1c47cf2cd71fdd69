"""If PostgreSQL cannot read or write an email, only that email fails. The worker and other emails are not affected."""

from __future__ import annotations

from typing import Final

from dispatcher.domain.outgoing import Attachment
from dispatcher.store.leases import MAX_OCTETS
from tests.store.damage import allow_damage, damage, noise, refused
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import leave_when_let_go

OTHERS = 20


DAMAGED: Final[dict[str, tuple[str, dict[str, object]]]] = {
    "a body": ("email_content", {"text": noise(9_000)}),
    "a large body": ("email_content", {"html": noise(2 * MAX_OCTETS)}),
    "an attachment": ("email_attachment", {"attachments": [Attachment("a.bin", "a/b", noise(9_000).encode())]}),
}


async def test_emails_with_damaged_or_invalid_content_fail_and_the_others_are_sent(bench: Bench) -> None:
    culprits = []
    for table, fields in DAMAGED.values():
        with damage(bench.books.connection, table):
            culprits.append(bench.books.enqueue_one(**fields))
    invalid, unread, *others = bench.books.enqueue(OTHERS + 2)
    bench.books.connection.execute(
        "update email_content set recipients = '[\"to\"]'::jsonb where email_id = %s", (invalid,)
    )
    bench.books.change(unread, attempt_count=1, attempt_base=1, recipient_outcomes="5")
    worker = await bench.start()

    await bench.deliver([*others[:7], *culprits, invalid, unread, *others[7:]])

    def is_done() -> bool:
        statuses = bench.books.statuses()
        return (statuses["sent"], statuses["failed"]) == (OTHERS, 4) or worker.task.done()

    await until(is_done)
    assert not worker.task.done()
    assert bench.provider.accepted == dict.fromkeys(others, 1)
    for email_id in (*culprits, invalid):
        row = bench.books.row(email_id)
        assert (row["status"], row["error_type"]) == ("failed", "content_unreadable")
        assert row["dead_letter_due_at"] is not None
        assert bench.books.outcomes(email_id) == ["rejected"]
    assert all("XX001" in bench.books.row(each)["last_error"] for each in culprits)
    await bench.nothing_left_on_the_queue()


async def test_an_email_whose_lease_cannot_be_renewed_does_not_affect_other_leases(bench: Bench) -> None:
    culprit, *others = bench.books.enqueue(4)
    books = bench.books
    with refused(books.connection, culprit, "new.status = 'sending' and new.locked_until > old.locked_until"):
        # Disable the trigger for now, because it would also refuse the lease.
        books.connection.execute("alter table email_log disable trigger refuse")
        await bench.begin(0, LEASE_SECONDS="1")
        await bench.deliver([culprit, *others])
        await until(lambda: len(bench.provider.waiting) == 4)
        books.connection.execute("alter table email_log enable trigger refuse")
        first_ends = {each: books.row(each)["locked_until"] for each in others}

        await until(lambda: all(books.row(each)["locked_until"] > first_ends[each] for each in others))

        bench.provider.let_go()
        await bench.settled({"sent": 4})


async def test_an_email_that_cannot_be_released_keeps_its_lease_and_the_others_are_released(bench: Bench) -> None:
    worker, (culprit, *_) = await bench.begin(4, leave_when_let_go)

    with refused(bench.books.connection, culprit, "new.status = 'pending'"):
        await worker.stop()

    assert bench.books.statuses() == {"pending": 3, "sending": 1}
    assert bench.books.status(culprit) == "sending"


async def test_an_email_that_cannot_be_leased_puts_only_one_message_on_the_dlq(bench: Bench) -> None:
    culprit = bench.books.enqueue_one()
    with refused(bench.books.connection, culprit, "new.status = 'sending'"):
        worker = await bench.start()
        for number in range(1, 4):
            await bench.deliver([culprit])
            await bench.enqueue()
            await bench.settled({"pending": 1, "sent": number})
        await worker.stop()

    (message,) = await bench.rabbit.take_all(bench.topology.dlq, 1)
    assert message.pointer.email_id == culprit
    assert await bench.rabbit.take(bench.topology.queue) is None


async def test_an_unreadable_email_does_not_stop_a_worker_whose_lease_was_interrupted(bench: Bench) -> None:
    books = bench.books
    *others, culprit = books.enqueue(OTHERS)
    keys = books.keys([*others, culprit])
    with allow_damage(books.connection), damage(books.connection, "email_log"):
        books.change(culprit, message_key=noise(9_000))
    with bench.books.locked(others[0]):
        for email_id, key in keys.items():
            await bench.deliver_pointer(email_id, key)
        worker = await bench.start()
        await until(lambda: books.terminate(worker.name, waiting=True) > 0)

    await until(lambda: books.statuses() == {"sent": OTHERS - 1, "pending": 1} or worker.task.done())
    assert not worker.task.done()
    assert bench.provider.accepted == dict.fromkeys(others, 1)
