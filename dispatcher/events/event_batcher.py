"""Stores the events of concurrent requests together, in one transaction.

Providers post hundreds of small requests per second. A transaction that stores ten events costs about as much as a
transaction that stores one event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from dispatcher.domain.provider_event import ProviderEvent
from dispatcher.errors import StoreBusy
from dispatcher.events.contract import EventSink

MAX_EVENTS: Final = 500
"""The most events per batch, unless a single request has more."""

_Waiting = tuple[Sequence[ProviderEvent], asyncio.Future[None]]


class EventBatcher:
    """An `EventSink` that stores one batch at a time. The requests that arrive while a batch is being stored form the
    next batch."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._waiting: deque[_Waiting] = deque()
        self._storing: asyncio.Task[None] | None = None

    async def store(self, events: Sequence[ProviderEvent]) -> None:
        if not events:
            return
        committed = asyncio.get_running_loop().create_future()
        self._waiting.append((events, committed))
        if self._storing is None:
            self._storing = asyncio.create_task(self._store_all())
        await committed

    async def _store_all(self) -> None:
        try:
            while self._waiting:
                await self._store(self._next())
        finally:
            self._storing = None

    def _next(self) -> list[_Waiting]:
        batch = [self._waiting.popleft()]
        count = len(batch[0][0])
        while self._waiting and count + len(self._waiting[0][0]) <= MAX_EVENTS:
            count += len(self._waiting[0][0])
            batch.append(self._waiting.popleft())
        return batch

    async def _store(self, batch: list[_Waiting]) -> None:
        """Stores a batch, and then completes the futures of its requests."""
        try:
            await self._sink.store([event for events, _ in batch for event in events])
        except StoreBusy as error:
            if len(batch) == 1:
                _fail(batch, error)
                return
            # Another transaction has locked an email of this batch. Store the requests one by one, so that only the
            # requests about this email fail.
            for each in batch:
                await self._store([each])
        except BaseException as error:
            _fail(batch, error)
            if not isinstance(error, Exception):
                raise
        else:
            for _, committed in batch:
                if not committed.done():  # the future is cancelled if the client has disconnected
                    committed.set_result(None)


def _fail(batch: list[_Waiting], error: BaseException) -> None:
    for _, committed in batch:
        if not committed.done():
            committed.set_exception(error) if isinstance(error, Exception) else committed.cancel()
