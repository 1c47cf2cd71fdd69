"""Lanes take turns for a provider's connections."""

from __future__ import annotations

import asyncio

from dispatcher.domain.turns import LaneWeights
from dispatcher.routing.gate import Gate


async def test_an_urgent_email_gets_the_next_free_slot_however_many_bulk_emails_wait() -> None:
    gate = Gate(2, LaneWeights())
    served: list[str] = []

    async def attempt(lane: str) -> None:
        await gate.acquire(lane)
        served.append(lane)

    bulk = [asyncio.create_task(attempt("bulk")) for _ in range(50)]
    await asyncio.sleep(0)
    assert served == ["bulk"] * 2
    urgent = asyncio.create_task(attempt("urgent"))
    await asyncio.sleep(0)
    gate.release()
    await urgent

    assert served == ["bulk", "bulk", "urgent"]
    for task in bulk:
        task.cancel()


async def test_a_cancelled_wait_loses_no_slot() -> None:
    gate = Gate(1, LaneWeights())
    await gate.acquire("normal")
    waiting = [asyncio.create_task(gate.acquire("normal")) for _ in range(3)]
    await asyncio.sleep(0)

    waiting[0].cancel()
    await asyncio.sleep(0)
    gate.release()  # grants the slot to the second, which is cancelled before it runs again
    waiting[1].cancel()
    await waiting[2]

    gate.release()
    await asyncio.wait_for(gate.acquire("normal"), 1)
