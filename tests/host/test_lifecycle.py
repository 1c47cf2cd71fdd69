"""`raise_on_stray_cancel` makes a stray cancellation an error; a deliberate cancellation ends the task."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.host.lifecycle import StrayCancel, raise_on_stray_cancel


async def await_a_future_that_is_cancelled() -> None:
    waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(waited_for.cancel)
    await waited_for


async def work_on() -> None:
    await asyncio.Event().wait()


async def test_a_stray_cancellation_is_an_error_and_ends_the_task_group() -> None:
    async def work() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(await_a_future_that_is_cancelled))
            group.create_task(raise_on_stray_cancel(work_on))

    with pytest.raises(ExceptionGroup) as raised:
        await work()

    assert raised.group_contains(StrayCancel)


async def test_work_that_is_cancelled_ends() -> None:
    working = asyncio.create_task(raise_on_stray_cancel(work_on))
    await asyncio.sleep(0)

    working.cancel()
    await asyncio.wait({working}, timeout=20)

    assert working.cancelled()
