"""If PostgreSQL cannot read or write an email, only that email fails. The worker and other emails are not affected."""

from __future__ import annotations

from typing import Final

import psycopg
import pytest

from dispatcher.domain.outgoing import Attachment
from dispatcher.store.leases import MAX_OCTETS
from tests.store.damage import allow_damage, damage, noise, refused
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import accept_when_let_go, leave_when_let_go

OTHERS = 20


DAMAGED: Final[dict[str, tuple[str, dict[str, object]]]] = {
    "a body": ("email_content", {"text": noise(9_000)}),
    "a large body": ("email_content", {"html": noise(2 * MAX_OCTETS)}),
    "an attachment": ("email_attachment", {"attachments": [Attachment("a.bin", "a/b", noise(9_000).encode())]}),
}


@pytest.mark.parametrize("damaged", DAMAGED)
async def test_an_email_with_a_damaged_value_fails_and_the_others_are_sent(bench: Bench, damaged: str) -> None:
    table, fields = DAMAGED[damaged]
    with damage(bench.books.connection, table):
        culprit = bench.books.enqueue_one(**fields)
    others = bench.books.enqueue(OTHERS)
    worker = await bench.start()

    await bench.deliver([*others[:7], culprit, *others[7:]])

    await bench.settled({"sent": OTHERS, "failed": 1})
    row = bench.books.row(culprit)
    assert (row["status"], row["error_type"]) == ("failed", "content_unreadable")
    assert "XX001" in row["last_error"]
    assert row["dead_letter_due_at"] is not None
    assert bench.books.outcomes(culprit) == ["rejected"]
    assert not worker.task.done()
    await bench.nothing_left_on_the_queue()
    assert bench.provider.accepted == dict.fromkeys(others, 1)


async def test_an_invalid_stored_email_fails_alone(bench: Bench) -> None:
    culprit, *others = bench.books.enqueue(OTHERS)
    bench.books.connection.execute(
        "update email_content set recipients = '[\"to\"]'::jsonb where email_id = %s", (culprit,)
    )
    await bench.start()

    await bench.deliver([*others, culprit])

    await bench.settled({"sent": OTHERS - 1, "failed": 1})
    assert bench.books.row(culprit)["error_type"] == "content_unreadable"
    await bench.nothing_left_on_the_queue()


async def test_an_email_whose_lease_cannot_be_renewed_does_not_affect_other_leases(bench: Bench) -> None:
    bench.provider.always = accept_when_let_go
    culprit, *others = bench.books.enqueue(4)
    with refused(bench.books.connection, culprit, "new.status = 'sending' and new.locked_until > old.locked_until"):
        await bench.start(LEASE_SECONDS="1")
        books = bench.books
        # Disable the trigger for now, because it would also refuse the lease.
        books.connection.execute("alter table email_log disable trigger refuse")
        await bench.deliver([culprit, *others])
        await until(lambda: len(bench.provider.waiting) == 4)
        books.connection.execute("alter table email_log enable trigger refuse")
        first_ends = {each: books.row(each)["locked_until"] for each in others}

        await until(lambda: all(books.row(each)["locked_until"] > first_ends[each] for each in others))

        bench.provider.let_go()
        await bench.settled({"sent": 4})


async def test_an_email_that_cannot_be_released_keeps_its_lease_and_the_others_are_released(bench: Bench) -> None:
    bench.provider.always = leave_when_let_go
    culprit, *others = bench.books.enqueue(4)
    worker = await bench.start()
    await bench.deliver([culprit, *others])
    await until(lambda: len(bench.provider.waiting) == 4)

    with refused(bench.books.connection, culprit, "new.status = 'pending'"):
        await worker.stop()

    assert bench.books.statuses() == {"pending": 3, "sending": 1}
    assert bench.books.status(culprit) == "sending"


async def test_an_email_that_cannot_be_leased_puts_only_one_message_on_the_dlq(
    bench: Bench,
) -> None:
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


async def test_an_unreadable_email_does_not_stop_a_worker_whose_lease_was_interrupted(
    bench: Bench, tables_url: str
) -> None:
    books = bench.books
    *others, culprit = books.enqueue(OTHERS)
    keys = books.keys([*others, culprit])
    with allow_damage(books.connection), damage(books.connection, "email_log"):
        books.change(culprit, message_key=noise(9_000))
    with psycopg.connect(tables_url) as person:
        person.execute("select from email_log where email_id = %s for update", [others[0]])
        for email_id, key in keys.items():
            await bench.deliver_pointer(email_id, key)
        worker = await bench.start()
        await until(lambda: books.terminate(worker.name, waiting=True) > 0)

    await until(lambda: books.statuses() == {"sent": OTHERS - 1, "pending": 1} or worker.task.done())
    assert not worker.task.done()
    assert bench.provider.accepted == dict.fromkeys(others, 1)


async def test_an_email_whose_recipient_outcomes_are_damaged_is_not_sent_and_the_others_are(bench: Bench) -> None:
    culprit, *others = bench.books.enqueue(OTHERS)
    bench.books.change(culprit, attempt_count=1, attempt_base=1, recipient_outcomes="5")
    worker = await bench.start()

    await bench.deliver([*others, culprit])

    await until(lambda: bench.books.statuses()["sent"] == OTHERS - 1 or worker.task.done())
    assert not worker.task.done()
    assert bench.provider.accepted == dict.fromkeys(others, 1)
