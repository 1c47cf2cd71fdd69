"""Concurrent requests share a transaction; a locked email delays only the requests that concern it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.event import EventKind, ProviderEvent
from dispatcher.errors import StoreBusy, StoreUnavailable
from dispatcher.events.intake import BATCH, EventBatcher
from tests.events.recorder import Recorder
from tests.events.requests import AT


def events(count: int = 1) -> list[ProviderEvent]:
    """Events of different emails."""
    return [
        ProviderEvent(email_id=new_email_id(), provider="ses", kind=EventKind.OPENED, happened_at=AT)
        for _ in range(count)
    ]


async def test_concurrent_requests_share_a_batch() -> None:
    sink = Recorder()
    batcher = EventBatcher(sink)

    await asyncio.gather(*(batcher.store(events()) for _ in range(100)))

    assert [len(batch) for batch in sink.batches] == [100]


async def test_a_batch_has_a_limit_and_a_request_is_never_split() -> None:
    sink = Recorder()
    batcher = EventBatcher(sink)

    await asyncio.gather(*(batcher.store(events(count)) for count in (BATCH - 1, 1, 1, 2 * BATCH)))

    assert [len(batch) for batch in sink.batches] == [BATCH, 1, 2 * BATCH]


async def test_no_events_need_no_transaction() -> None:
    sink = Recorder()

    await EventBatcher(sink).store([])

    assert sink.batches == []


async def test_an_outage_fails_every_request_of_the_batch_and_the_next_batch_is_stored() -> None:
    sink = Recorder(faults=[StoreUnavailable("away")])
    batcher = EventBatcher(sink)

    found = await asyncio.gather(*(batcher.store(events()) for _ in range(3)), return_exceptions=True)
    await batcher.store(events())

    assert [type(each) for each in found] == [StoreUnavailable] * 3
    assert len(sink.batches) == 1


async def test_a_locked_email_fails_only_its_own_request() -> None:
    locked = events()

    class Locking(Recorder):
        async def store(self, given: Sequence[ProviderEvent]) -> None:
            await super().store(given)
            if locked[0] in given:
                raise StoreBusy("locked")

    batcher = EventBatcher(Locking())

    found = await asyncio.gather(
        batcher.store(events()), batcher.store(locked), batcher.store(events()), return_exceptions=True
    )

    assert [type(each) for each in found] == [type(None), StoreBusy, type(None)]


async def test_a_client_that_disconnects_does_not_disturb_the_others() -> None:
    sink = Recorder()
    batcher = EventBatcher(sink)
    leaving = asyncio.create_task(batcher.store(events()))
    staying = asyncio.create_task(batcher.store(events()))
    await asyncio.sleep(0)

    leaving.cancel()
    await staying

    assert len(sink.batches[0]) == 2
    with pytest.raises(asyncio.CancelledError):
        await leaving
