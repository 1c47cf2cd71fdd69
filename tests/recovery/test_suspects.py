"""An email that was being rendered when its worker died is released only after its crash is counted."""

from __future__ import annotations

import asyncio

import psycopg

from tests.recovery.lost_workers import RELAY, Host, rendering, unsent
from tests.store.books import Books
from tests.waiting import until


async def test_a_suspect_that_was_locked_while_crashes_were_counted_keeps_its_lease(host: Host) -> None:
    suspect, other = await host.lease(2)
    host.die((suspect, rendering), (other, unsent))

    with psycopg.connect(host.url) as person:
        Books(person).lock(suspect.email_id)
        settling = asyncio.create_task(host.settle())
        # A release of the suspect would wait for the lock, and succeed after its end.
        await until(lambda: settling.done() or host.books.waiting_for_a_lock(RELAY))
    await settling

    assert host.statuses(suspect, other) == ["sending", "pending"]
    await host.settle()
    assert (host.statuses(suspect), host.row(suspect)["crash_count"]) == (["pending"], 1)
    assert host.ledgers() == []
