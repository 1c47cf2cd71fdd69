"""The inbox of the lease stage. It keeps messages by lane, and takes them from the lanes in turns, by weight."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from dispatcher.broker.consumer import Delivery
from dispatcher.broker.pointer import Pointer
from dispatcher.domain.turns import LaneWeights, Turns
from dispatcher.host.batch_queue import MAX_BATCH, BatchQueue, take
from dispatcher.worker.window import Window


class Arrival(NamedTuple):
    delivery: Delivery
    pointer: Pointer


class _LaneQueues:
    """A queue of arrivals for each lane, in place of the deque in `BatchQueue`."""

    def __init__(self) -> None:
        self.by_lane: dict[str, deque[Arrival]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.by_lane.values()))

    def append(self, arrival: Arrival) -> None:
        try:
            self.by_lane[arrival.delivery.lane].append(arrival)
        except KeyError:
            self.by_lane[arrival.delivery.lane] = deque([arrival])

    def clear(self) -> None:
        self.by_lane.clear()


class LaneInbox(BatchQueue[Arrival]):
    """Passes arrivals to the lease stage in batches; lanes take turns. The most urgent lane may exceed the prefetch
    window by an eighth: otherwise, its emails would wait while the window is full of slow emails of other lanes."""

    def __init__(self, weights: LaneWeights) -> None:
        super().__init__()
        self._queues = self._items = _LaneQueues()  # type: ignore[assignment]
        self._weights = weights
        self._turns = Turns(weights.of)
        self._window: Window | None = None

    async def lease(self, handle: Callable[[list[Arrival]], Awaitable[None]], window: Window) -> None:
        """Passes batches to `handle` until cancelled. A batch has no more arrivals than emails may be leased now."""
        self._window = window
        # If an email must probe a provider, choose this email at random: emails that the provider would refuse may
        # arrive one after another.
        await self.run(handle, room=window.room, is_any_order=window.is_probing)

    def take_lane(self, lane: str) -> list[Arrival]:
        return list(self._queues.by_lane.pop(lane, ()))

    def _next(self, room: int, is_any_order: Callable[[], bool]) -> list[Arrival]:
        lanes = [lane for lane, queue in self._queues.by_lane.items() if queue]
        if len(lanes) == 1:
            batch = take(self._queues.by_lane[lanes[0]], room, is_any_order)
        else:
            batch = self._in_turns(min(room, MAX_BATCH), is_any_order)
        urgent = self._weights.urgent
        if urgent in lanes and self._window is not None and (queue := self._queues.by_lane[urgent]):
            extra = min(self._window.urgent_room(), MAX_BATCH) - len(batch)
            batch += [queue.popleft() for _ in range(min(extra, len(queue)))]
        return batch

    def _in_turns(self, room: int, is_any_order: Callable[[], bool]) -> list[Arrival]:
        queues = self._queues.by_lane
        if 0 < room < len(self._queues) and is_any_order():
            for queue in queues.values():
                queue.rotate(random.randrange(len(queue) + 1))  # noqa: S311
        batch: list[Arrival] = []
        while len(batch) < room and (waiting := [lane for lane, queue in queues.items() if queue]):
            lane = self._turns.next(waiting)
            self._turns.charge(lane)
            batch.append(queues[lane].popleft())
        return batch
