"""Concurrent tasks: a failed task is restarted, and does not end other tasks. Also what they run on: cancellation, and
look-ups of host names."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from dispatcher.errors import StatementRefused, StoreUnavailable
from dispatcher.host import services
from dispatcher.host.lifecycle import StrayCancel, raise_on_stray_cancel
from dispatcher.host.name_lookup import resolve
from dispatcher.host.services import Periodic, Task, run_tasks
from tests.waiting import DEADLINE_SECONDS, until


async def await_a_future_that_is_cancelled() -> None:
    waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(waited_for.cancel)
    await waited_for


class Failing:
    times = 0

    async def run(self) -> None:
        self.times += 1
        raise LookupError("ann@example.org")


class CutOff(Failing):
    async def run(self) -> None:
        self.times += 1
        await await_a_future_that_is_cancelled()


class Steady:
    """A task that runs until it is cancelled, and records the cancellation. A deaf one does not end then."""

    times = 0
    ended = False

    def __init__(self, *, is_deaf: bool = False) -> None:
        self.released = asyncio.Event()
        self._is_deaf = is_deaf

    async def run(self) -> None:
        self.times += 1
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.ended = True
                if not self._is_deaf:
                    raise


class Rounds:
    """A service whose first rounds raise the given exceptions, one exception per round."""

    def __init__(self, *faults: Exception, interval_seconds: float = 0.001) -> None:
        self.interval_seconds = interval_seconds
        self.faults = list(faults)
        self.rounds = 0

    async def run_once(self) -> None:
        self.rounds += 1
        if self.faults:
            raise self.faults.pop(0)


@asynccontextmanager
async def kept(*tasks: Task) -> AsyncIterator[None]:
    stop = asyncio.Event()
    keeping_them = asyncio.create_task(run_tasks(tasks, stop, process="monitor", first_wait_seconds=0.001))
    try:
        yield
    finally:
        stop.set()
        await keeping_them


async def test_a_task_that_fails_or_is_cut_off_is_restarted_and_does_not_end_the_others() -> None:
    failing, cut_off, steady, service = Failing(), CutOff(), Steady(), Rounds(LookupError("x"))

    with capture_logs() as logs:
        async with kept(steady, failing, cut_off, Periodic(service)):
            await until(lambda: failing.times >= 3 and cut_off.times >= 3 and service.rounds > 2)
            assert not steady.ended

    assert (steady.ended, steady.times) == (True, 1)
    logged = {log["where"]: log["error"] for log in logs}
    assert logged.keys() == {"monitor: Failing", "monitor: CutOff", "monitor: Rounds"}
    assert logged["monitor: Failing"].startswith("LookupError at test_services.py:")  # without the private text


async def test_a_task_that_ignores_cancellation_delays_the_exit_by_seconds_at_most() -> None:
    deaf = Steady(is_deaf=True)
    began_at = time.monotonic()

    async with kept(deaf):
        await asyncio.sleep(0)

    assert deaf.ended
    assert time.monotonic() - began_at < services.END_SECONDS + 10
    deaf.released.set()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("fault", "event"), [(StoreUnavailable, "store.connection_lost"), (StatementRefused, "service.refused")]
)
async def test_a_fault_of_postgresql_is_logged_once_until_a_round_succeeds(
    fault: type[StoreUnavailable | StatementRefused], event: str
) -> None:
    service = Rounds(*(fault("the first time.") for _ in range(3)))

    with capture_logs() as logs:
        async with kept(Periodic(service)):
            await until(lambda: service.rounds > 4)
            service.faults.append(fault("again."))
            await until(lambda: not service.faults)

    assert [(log["event"], log["reason"]) for log in logs] == [(event, "the first time."), (event, "again.")]


async def test_run_if_due_runs_a_service_only_if_it_is_due_or_woken() -> None:
    service = Rounds(StatementRefused("Not raised."), interval_seconds=3600)
    step = Periodic(service)

    for _ in range(3):
        await step.run_if_due()
    assert service.rounds == 1

    def runs_when_woken() -> bool:
        step.woken.set()
        return service.rounds > 1

    async with kept(step):
        await until(runs_when_woken)


async def test_a_stray_cancellation_is_an_error_and_ends_the_task_group() -> None:
    async def work() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(await_a_future_that_is_cancelled))
            group.create_task(raise_on_stray_cancel(asyncio.Event().wait))

    with pytest.raises(ExceptionGroup) as raised:
        await work()

    assert raised.group_contains(StrayCancel)


async def test_a_name_is_resolved_while_all_threads_of_the_loop_are_occupied() -> None:
    loop, ended = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    occupied = loop.run_in_executor(None, ended.wait)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            found = await resolve("localhost", 443)
    finally:
        ended.set()
        await occupied

    assert set(found) & {"127.0.0.1", "::1"}
    assert len(found) == len(set(found))
