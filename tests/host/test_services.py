"""Tasks side by side: one that fails is begun again, and none ends another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from structlog.testing import capture_logs

from dispatcher.errors import StoreUnavailable
from dispatcher.host import services
from dispatcher.host.services import Periodic, Task, keep
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
    keeping_them = asyncio.create_task(keep(tasks, stop, process="monitor", first_wait_seconds=0.001))
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
    assert logs[0]["error"].startswith("LookupError at test_services.py:")


async def test_a_task_that_does_not_want_to_end_delays_the_end_by_seconds_at_most() -> None:
    deaf = Deaf()
    began_at = time.monotonic()

    async with kept(deaf):
        await asyncio.sleep(0)

    assert deaf.asked
    assert time.monotonic() - began_at < services.END_SECONDS + 10
    deaf.released.set()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


class Rounds:
    """A service whose rounds raise these faults, one each, and then none."""

    interval_seconds = 0.001

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)
        self.rounds = 0

    async def run_once(self) -> None:
        """See `Service`."""
        self.rounds += 1
        if self.faults:
            raise self.faults.pop(0)


class Endless:
    """A service whose first round never ends."""

    interval_seconds = 0.001

    async def run_once(self) -> None:
        """See `Service`."""
        await asyncio.Event().wait()


async def test_a_postgresql_that_is_away_is_logged_once_until_a_round_works_again() -> None:
    away = [StoreUnavailable("PostgreSQL is away.") for _ in range(3)]
    service = Rounds(*away)

    with capture_logs() as logs:
        async with kept(Periodic(service)):
            await until(lambda: service.rounds > 4)
            service.faults.append(StoreUnavailable("PostgreSQL is away again."))
            await until(lambda: not service.faults)

    assert [log["reason"] for log in logs] == ["PostgreSQL is away.", "PostgreSQL is away again."]
    assert {log["event"] for log in logs} == {"store.connection_lost"}


async def test_a_service_that_fails_is_tried_again_and_a_slow_one_delays_no_other() -> None:
    failing, slow, steady = Rounds(LookupError("x")), Endless(), Rounds()

    with capture_logs() as logs:
        async with kept(Periodic(slow), Periodic(failing), Periodic(steady)):
            await until(lambda: failing.rounds > 2 and steady.rounds > 2)

    assert [log["where"] for log in logs] == ["monitor: Rounds"]


async def test_a_step_of_a_loop_runs_a_service_only_when_it_is_due() -> None:
    service = Rounds()
    service.interval_seconds = 3600
    step = Periodic(service)

    for _ in range(3):
        await step.run_if_due()

    assert service.rounds == 1


async def test_nothing_to_do_ends_at_the_stop() -> None:
    async with kept():
        pass
