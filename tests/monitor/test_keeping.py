"""The monitor's tasks side by side: one that fails is begun again, and none ends another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from structlog.testing import capture_logs

from dispatcher.monitor import keeping
from dispatcher.monitor.keeping import Task, keep
from tests.waiting import until


class Failing:
    """Fails each time that it is begun."""

    times = 0

    async def run(self) -> None:
        """See `Task`."""
        self.times += 1
        raise LookupError("ann@example.org")


class CutOff:
    """Waits for what somebody else cancels."""

    times = 0

    async def run(self) -> None:
        """See `Task`."""
        self.times += 1
        waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waited_for.cancel()
        await waited_for


class Steady:
    """Works on; notes when it is told to end."""

    times = 0
    ended = False

    async def run(self) -> None:
        """See `Task`."""
        self.times += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


class Deaf:
    """Does not want to end."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.asked = False

    async def run(self) -> None:
        """See `Task`."""
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.asked = True


@asynccontextmanager
async def kept(*tasks: Task) -> AsyncIterator[None]:
    """Runs them for the length of a block."""
    stop = asyncio.Event()
    keeping_them = asyncio.create_task(keep(tasks, stop, first_wait_seconds=0.001))
    try:
        yield
    finally:
        stop.set()
        await keeping_them


async def test_a_task_that_fails_is_begun_again_and_ends_no_other() -> None:
    failing, steady = Failing(), Steady()

    async with kept(failing, steady):
        await until(lambda: failing.times >= 3)
        assert not steady.ended

    assert steady.ended
    assert steady.times == 1


async def test_a_task_that_somebody_else_cut_off_is_begun_again() -> None:
    cut_off = CutOff()

    async with kept(cut_off):
        await until(lambda: cut_off.times >= 3)


async def test_what_a_stranger_s_exception_says_stays_out_of_the_log() -> None:
    failing = Failing()

    with capture_logs() as logs:
        async with kept(failing):
            await until(lambda: failing.times)

    assert logs[0]["where"] == "monitor: Failing"
    assert logs[0]["error"].startswith("LookupError at test_keeping.py:")


async def test_a_task_that_does_not_want_to_end_delays_the_end_by_seconds_at_most() -> None:
    deaf = Deaf()
    began_at = time.monotonic()

    async with kept(deaf):
        await asyncio.sleep(0)

    assert deaf.asked
    assert time.monotonic() - began_at < keeping.END_SECONDS + 10
    deaf.released.set()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


async def test_nothing_to_do_ends_at_the_stop() -> None:
    async with kept():
        pass
