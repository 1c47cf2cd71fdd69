"""Requests that wait for a permit take turns, and one caller has at most half of the permits."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from dispatcher.api.fair_limiter import FairTurns
from dispatcher.api.problems import Problem
from tests.waiting import DEADLINE_SECONDS, until

FLOOD: Final = 200


class Requests:
    """Requests that each hold a permit until the test ends them; `holding` has their callers, in order."""

    def __init__(self, turns: FairTurns) -> None:
        self._turns = turns
        self._ends: list[asyncio.Event] = []
        self.holding: list[str] = []

    def send(self, name: str, count: int = 1) -> list[asyncio.Task[None]]:
        """Starts requests of a caller."""
        return [asyncio.create_task(self._hold(name)) for _ in range(count)]

    async def _hold(self, name: str) -> None:
        async with self._turns.turn(name):
            end = asyncio.Event()
            self.holding.append(name)
            self._ends.append(end)
            await end.wait()

    def end_oldest(self) -> None:
        """Ends the request that has held its permit for the longest time."""
        self._ends.pop(0).set()
        self.holding.pop(0)


@pytest.mark.parametrize("permits", [2, 4])
async def test_a_caller_within_its_half_never_waits_for_another_caller(permits: int) -> None:
    turns = FairTurns(permits, seconds=DEADLINE_SECONDS)
    flood = Requests(turns)
    tasks = flood.send("a", FLOOD)
    await until(lambda: len(flood.holding) == permits // 2)

    admitted = 0
    for _ in range(FLOOD):
        async with asyncio.timeout(DEADLINE_SECONDS), turns.turn("b"):
            admitted += 1

    assert (admitted, len(flood.holding)) == (FLOOD, permits // 2)
    for task in tasks:
        task.cancel()


async def test_a_caller_that_joins_waits_for_one_turn_of_each_other_caller() -> None:
    requests = Requests(FairTurns(4, seconds=DEADLINE_SECONDS))
    tasks = [*requests.send("a", FLOOD), *requests.send("b", FLOOD)]
    await until(lambda: requests.holding == ["a", "a", "b", "b"])
    tasks += requests.send("c")
    await asyncio.wait(tasks, timeout=0)

    for _ in range(2):
        requests.end_oldest()
        await until(lambda: len(requests.holding) == 4)
    assert "c" in requests.holding
    for task in tasks:
        task.cancel()


async def test_a_request_whose_turn_does_not_come_is_refused_and_no_permit_is_lost() -> None:
    turns = FairTurns(2, seconds=0)
    requests = Requests(turns)
    async with turns.turn("a"):
        with pytest.raises(Problem) as refused:
            async with turns.turn("a"):
                pytest.fail("two permits of two")
    tasks = requests.send("a") + requests.send("b")
    await until(lambda: sorted(requests.holding) == ["a", "b"])

    assert (refused.value.code, refused.value.retry_after) == ("overloaded", 1)
    for task in tasks:
        task.cancel()


async def test_a_request_that_is_cancelled_as_it_gets_its_permit_gives_the_permit_back() -> None:
    turns = FairTurns(2, seconds=DEADLINE_SECONDS)
    requests = Requests(turns)
    (first,) = requests.send("a")
    await until(lambda: requests.holding)
    (second,) = requests.send("a")
    waiting = asyncio.create_task(asyncio.wait([second], timeout=0))
    await waiting
    first.cancel()
    await asyncio.wait([first])  # its permit goes to the second request, which has not continued yet
    second.cancel()
    await asyncio.wait([second])

    async with asyncio.timeout(DEADLINE_SECONDS), turns.turn("a"):
        pass
