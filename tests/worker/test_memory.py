"""Large emails share a memory budget, and wait until enough of it is free. Small emails are sent meanwhile. Memory of
sent emails is freed immediately: reference cycles would keep it until the garbage collector runs, maybe hours later."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.domain.outcome import Outcome
from dispatcher.domain.outgoing import Attachment, OutgoingEmail
from dispatcher.providers.contract import Attempt
from dispatcher.store.leases import Lease
from dispatcher.transport.mime import RenderedEmail
from dispatcher.transport.smtp_transaction import SmtpTransaction
from dispatcher.worker.attempts import LedgerAttempt
from dispatcher.worker.bulk_calls import with_bulk_calls
from dispatcher.worker.contents import MemoryBudget, NoMemory
from dispatcher.worker.in_flight_email import InFlightEmail
from tests.providers.http_places import sendgrid_place
from tests.providers.places import smtp_place
from tests.providers.ses_place import ses_place
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider, accept, accept_when_let_go

MEGABYTE = 1_000_000
LARGE = [Attachment("a.bin", "a/b", bytes(2 * MEGABYTE))]
TOO_LARGE = [Attachment("a.bin", "a/b", bytes(5 * MEGABYTE))]
LIGHT = [Attachment("a.bin", "a/b", bytes(MEGABYTE // 10))]
BOUND = "16"
"""The budget in megabytes. One LARGE email fits at a time; a TOO_LARGE email exceeds the budget."""


async def wait_if_large(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    is_large = sum(len(file.content) for file in email.attachments) > MEGABYTE
    return await (accept_when_let_go if is_large else accept)(provider, email, attempt)


@pytest.mark.parametrize("prefetch", ["8", "256"])
async def test_large_emails_share_a_memory_budget_and_delay_no_small_or_light_one(bench: Bench, prefetch: str) -> None:
    bench.provider.always = wait_if_large
    large = [*bench.books.enqueue(1, attachments=TOO_LARGE), *bench.books.enqueue(9, attachments=LARGE)]
    small = [*bench.books.enqueue(45), *bench.books.enqueue(5, attachments=LIGHT)]
    await bench.start(WORKER_MEMORY_MB=BOUND, PREFETCH=prefetch)

    await bench.deliver([*large, *small])

    await until(lambda: bench.provider.accepted == dict.fromkeys(small, 1) and len(bench.provider.waiting) == 1)
    bench.provider.let_go()
    await until(lambda: bench.books.statuses()["sending"] == 0)
    given_back = bench.books.statuses()["pending"]
    assert (not given_back) == (prefetch == "256")
    while due := [row["email_id"] for row in bench.books.rows() if row["publish_due_at"] is not None]:
        assert all(bench.books.attempts(email_id) == [] for email_id in due)
        await bench.deliver(due)  # as the relay does with due emails
        await until(lambda: bench.books.statuses()["sent"] > 60 - len(due))
        await until(lambda: bench.books.statuses()["sending"] == 0)
    await bench.each_is_sent_once([*large, *small])


async def test_emails_that_wait_for_memory_take_no_slot_of_the_window_and_are_released_by_a_drain(bench: Bench) -> None:
    bench.provider.always = accept_when_let_go
    worker = await bench.start(WORKER_MEMORY_MB=BOUND, PREFETCH="8")
    await bench.enqueue(2, attachments=LARGE)
    await until(lambda: len(bench.provider.waiting) == 1 and bench.books.statuses() == {"sending": 2})

    await bench.enqueue(7)

    await until(lambda: len(bench.provider.waiting) == 8)
    worker.begin_to_stop()
    await until(lambda: bench.books.statuses() == {"sending": 8, "pending": 1})
    bench.provider.let_go()
    await worker.stop()
    assert bench.books.statuses() == {"sent": 8, "pending": 1}


async def test_memory_is_granted_in_order_and_cancelled_requests_free_theirs() -> None:
    memory = MemoryBudget(10, most_waiting=2)
    assert memory.take(8) is None
    first, second = memory.take(8), memory.take(2)
    assert first is not None
    assert second is not None
    with pytest.raises(NoMemory) as refused:
        memory.take(1)
    assert refused.value.delay_seconds > 0

    memory.cancel(8, first)
    await asyncio.wait_for(second, 1)
    memory.cancel(2, second)
    memory.give_back(8)

    assert memory.take(100) is None


COUNT = 40
OF_AN_EMAIL = {LedgerAttempt, Lease, OutgoingEmail, RenderedEmail, InFlightEmail, SmtpTransaction}


@pytest.fixture
def saved_garbage() -> Iterator[None]:
    """Disables the collector. A collection by hand moves what it finds to `gc.garbage`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("opened", "most_in_a_call"),
    [(sendgrid_place, 1), (sendgrid_place, 10), (ses_place, 1), (ses_place, 10), (smtp_place, 1)],
)
@pytest.mark.usefixtures("saved_garbage")
async def test_a_sent_email_leaves_nothing_for_the_garbage_collector(
    bench: Bench, tmp_path: Path, opened: Any, most_in_a_call: int
) -> None:
    template: dict[str, Any] = {"template_id": "d-1", "text": None, "subject": ""} if most_in_a_call > 1 else {}
    async with opened(tmp_path / "double") as place:
        await bench.start([with_bulk_calls(place.provider, most_in_a_call)])

        await bench.enqueue(COUNT, **template)
        await bench.settled({"sent": COUNT})

        gc.collect()
        assert not OF_AN_EMAIL & {type(each) for each in gc.garbage}
