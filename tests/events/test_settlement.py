"""The leading relay settles emails that an event has marked while a worker had leased them."""

from __future__ import annotations

from dispatcher.config import Settings
from dispatcher.domain.status import Status
from dispatcher.events.intake import EventIntake
from dispatcher.store.leases import LeaseStore
from tests.events.test_intake import event
from tests.relay.running import Start
from tests.store.books import Books
from tests.store.results import result
from tests.waiting import until


async def test_the_relay_settles_emails_that_a_worker_recorded_after_the_event(
    start: Start, settings: Settings, books: Books, store: LeaseStore, intake: EventIntake
) -> None:
    email_ids = books.enqueue(3)
    leases = await store.lease(books.keys(email_ids), 600)
    await intake.store([event(email_id) for email_id in email_ids])
    await store.record(
        [
            result(lease, status, error_type="outcome_unknown")
            for lease, status in zip(leases, (Status.HELD, Status.FAILED, Status.PENDING), strict=True)
        ]
    )

    await start(settings)

    await until(lambda: books.statuses() == {"sent": 3})
    assert books.count("operator_audit") == 3
