"""Memory of sent emails is freed immediately. Reference cycles would keep this memory until the garbage collector runs,
maybe hours later."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.store.leases import Lease
from dispatcher.transport.mime import RenderedEmail
from dispatcher.transport.smtp_transaction import SmtpTransaction
from dispatcher.worker.attempts import LedgerAttempt
from dispatcher.worker.bulk_calls import with_bulk_calls
from dispatcher.worker.in_flight_email import InFlightEmail
from tests.providers.places import smtp_place
from tests.providers.sendgrid_place import sendgrid_place
from tests.providers.ses_place import ses_place
from tests.worker.bench import Bench

COUNT = 40
OF_AN_EMAIL = (LedgerAttempt, Lease, OutgoingEmail, RenderedEmail, InFlightEmail, SmtpTransaction)


@pytest.fixture
def garbage() -> Iterator[Callable[[], Counter[str]]]:
    """Disables the collector; yields a function that counts uncollected email objects by type."""

    def found() -> Counter[str]:
        gc.collect()
        return Counter(type(each).__name__ for each in gc.garbage if type(each) in OF_AN_EMAIL)

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("opened", "most_in_a_call"),
    [(sendgrid_place, 1), (sendgrid_place, 10), (ses_place, 1), (ses_place, 10), (smtp_place, 1)],
)
async def test_a_sent_email_leaves_nothing_for_the_garbage_collector(
    bench: Bench, tmp_path: Path, opened: Any, most_in_a_call: int, garbage: Callable[[], Counter[str]]
) -> None:
    template: dict[str, object] = (
        {"template_id": "d-1", "template_data": {}, "text": None, "subject": ""} if most_in_a_call > 1 else {}
    )
    async with opened(tmp_path / "double") as place:
        await bench.start([with_bulk_calls(place.provider, most_in_a_call)])

        await bench.enqueue(COUNT, **template)
        await bench.settled({"sent": COUNT})

        assert garbage() == {}
