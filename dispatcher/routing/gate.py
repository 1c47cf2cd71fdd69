"""Limits how many attempts a worker makes at one provider at a time. If more emails wait, their lanes take turns.

An adapter's connection pool serves emails in the order of arrival. Without this limit, if the provider is slow, an
urgent email would wait for all earlier emails of other lanes.
"""

from __future__ import annotations

import asyncio
from collections import deque

from dispatcher.domain.turns import LaneWeights, Turns


class Gate:
    """The slots of one provider in one worker. Each attempt needs a slot."""

    def __init__(self, slots: int, weights: LaneWeights) -> None:
        self._free = slots
        self._turns = Turns(weights.of)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {lane: deque() for lane in weights.lanes}

    def try_acquire(self) -> bool:
        """Takes a slot if one is free. Returns whether a slot was free. Call `release` when the attempt has ended."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def acquire(self, lane: str) -> None:
        """Waits for a slot. Call `release` when the attempt has ended."""
        if self.try_acquire():
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lane, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Gives a slot back. If emails wait, the next email gets the slot."""
        # Emails wait only while no slot is free. If another slot is already free, no email waits, and this slot becomes
        # free, too.
        while not self._free and (lanes := [lane for lane, slots in self._waiting.items() if slots]):
            lane = self._turns.next(lanes)
            slot = self._waiting[lane].popleft()
            if not slot.done():
                self._turns.charge(lane)
                slot.set_result(None)
                return
        self._free += 1
