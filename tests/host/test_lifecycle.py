"""Work that has no end but the stop."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.host.lifecycle import CutOff, unless_cut_off


async def wait_for_what_somebody_cancels() -> None:
    waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(waited_for.cancel)
    await waited_for


async def work_on() -> None:
    await asyncio.Event().wait()


async def test_work_that_was_cut_off_is_a_fault_and_ends_those_beside_it() -> None:
    async def work() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(unless_cut_off(wait_for_what_somebody_cancels))
            group.create_task(unless_cut_off(work_on))

    with pytest.raises(ExceptionGroup) as raised:
        await work()

    assert raised.group_contains(CutOff)


async def test_work_that_is_told_to_end_ends() -> None:
    working = asyncio.create_task(unless_cut_off(work_on))
    await asyncio.sleep(0)

    working.cancel()
    await asyncio.wait({working}, timeout=20)

    assert working.cancelled()
