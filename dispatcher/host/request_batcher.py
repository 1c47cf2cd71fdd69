"""Commits the items of concurrent requests in batches, one transaction per batch.

A commit waits about two milliseconds for the disk, and a batch of a hundred items waits only once. The batcher never
delays a batch to make it larger: it starts a transaction when an earlier one has ended. All items that have arrived by
then form the next batch, so batches grow with the load. (`batch_queue` is for items for whose result no request waits.)

If PostgreSQL refuses a batch because of one item, the batcher splits the batch until that item is alone, and commits
all other items.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dispatcher.errors import DispatcherError, StoreBusy, StoreUnavailable

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class _Request(Generic[R]):
    """The results for one request's items, in order. `done` is set when every item has its result."""

    results: list[R | DispatcherError | None]
    missing: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Queued(Generic[T, R]):
    """One item, and the request that waits for its result."""

    item: T
    request: _Request[R]
    index: int
    size: int

    def set_result(self, result: R | DispatcherError) -> None:
        self.request.results[self.index] = result
        self.request.missing -= 1
        if self.request.missing == 0 and not self.request.done.done():  # done if the client has disconnected
            self.request.done.set_result(None)


class RequestBatcher(Generic[T, R]):
    """Commits items in batches. Tenants take turns, so a tenant with many items does not delay the others."""

    def __init__(
        self,
        commit: Callable[[list[T]], Awaitable[Sequence[R]]],
        *,
        size_of: Callable[[T], int],
        most_size: int,
        most_items: int | None = None,
        tenant_of: Callable[[T], str] = lambda _: "",
        concurrent: int = 1,
        concurrent_parts: int = 0,
    ) -> None:
        """`commit` returns the items' results, in order. A batch has at most `most_items`, and at most `most_size`
        unless a single item is larger. `concurrent`: the most concurrent transactions. `concurrent_parts`: how many
        more for the parts of refused batches, so that new batches do not wait; 0 if new batches wait."""
        self._commit = commit
        self._size_of = size_of
        self._most_size = most_size
        self._most_items = most_items or math.inf
        self._tenant_of = tenant_of
        self._free = concurrent
        self._part_slots = asyncio.Semaphore(concurrent_parts or 1)
        self._parts_wait = not concurrent_parts
        self._waiting: dict[str, deque[_Queued[T, R]]] = {}  # by tenant; the first tenant has the next turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_scheduled = False

    async def submit(self, items: Sequence[T]) -> list[R | DispatcherError]:
        """Commits items, and returns their results in the same order. Errors are values, because other items of the
        same batch have other results."""
        if not items:
            return []
        loop = asyncio.get_running_loop()
        request: _Request[R] = _Request([None] * len(items), len(items), loop.create_future())
        for index, item in enumerate(items):
            tenant_id = self._tenant_of(item)
            queue = self._waiting.get(tenant_id)
            if queue is None:
                queue = self._waiting[tenant_id] = deque()
            queue.append(_Queued(item, request, index, self._size_of(item)))
        if not self._is_scheduled:
            # Begin a moment later, so that the batch also contains the items of other requests that the event loop
            # reads in the same iteration.
            self._is_scheduled = True
            loop.call_soon(self._begin)
        await request.done
        return request.results  # type: ignore[return-value]  # every item has its result now

    async def finish(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self) -> None:
        self._is_scheduled = False
        while self._waiting and self._free:
            self._free -= 1
            task = asyncio.create_task(self._run(self._next_batch()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[_Queued[T, R]]:
        batch: list[_Queued[T, R]] = []
        size = 0
        while self._waiting and len(batch) < self._most_items:
            tenant_id, queue = next(iter(self._waiting.items()))
            size += queue[0].size
            if batch and size > self._most_size:
                break
            batch.append(queue.popleft())
            if not queue:
                del self._waiting[tenant_id]
            elif len(self._waiting) > 1:
                self._waiting[tenant_id] = self._waiting.pop(tenant_id)  # moves the tenant behind all other tenants
        return batch

    async def _run(self, batch: list[_Queued[T, R]]) -> None:
        refusal = await self._committed(batch)
        if refusal is not None and self._parts_wait:
            await self._split(batch, refusal)
        self._free += 1
        self._begin()
        if refusal is not None and not self._parts_wait:
            await self._split(batch, refusal)

    async def _committed(self, batch: list[_Queued[T, R]]) -> DispatcherError | None:
        """Commits a batch and sets its results. If that fails, sets no results and returns the error."""
        try:
            results = await self._commit([queued.item for queued in batch])
            for queued, result in zip(batch, results, strict=True):
                queued.set_result(result)
        except DispatcherError as error:
            return error.with_traceback(None)  # the traceback would keep the batch in memory
        except Exception as error:  # noqa: BLE001 - the waiting requests raise it
            for request in {id(queued.request): queued.request for queued in batch}.values():
                if not request.done.done():
                    request.done.set_exception(error)
        return None

    async def _split(self, batch: list[_Queued[T, R]], refusal: DispatcherError) -> None:
        """Commits the parts of a refused batch. The error becomes the result if there is one item, or if PostgreSQL is
        unavailable."""
        affects_all = isinstance(refusal, StoreUnavailable) and not isinstance(refusal, StoreBusy)
        if affects_all or len(batch) == 1:
            for queued in batch:
                queued.set_result(refusal)
            return
        # n items become about √n parts, not halves, because each lock timeout takes long. In a batch of 256 items, the
        # locked item is found after five timeouts (256, 16, 4, 2 and 1 items). Halves would need nine.
        size = max(1, math.isqrt(len(batch)))
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            async with self._part_slots:
                refused = await self._committed(part)
            if refused is not None:
                await self._split(part, refused)
