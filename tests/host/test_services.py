"""Concurrent tasks: a failed task is restarted, and does not end other tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from structlog.testing import capture_logs

from dispatcher.errors import StatementRefused, StoreUnavailable
from dispatcher.host import services
from dispatcher.host.services import Periodic, Task, run_tasks
from tests.waiting import until


class Failing:
    times = 0

    async def run(self) -> None:
        self.times += 1
        raise LookupError("ann@example.org")


class StrayCancel:
    times = 0

    async def run(self) -> None:
        self.times += 1
        waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waited_for.cancel()
        await waited_for


class Steady:
    """A task that runs until it is cancelled, and records the cancellation."""

    times = 0
    ended = False

    async def run(self) -> None:
        self.times += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


class Deaf:
    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.asked = False

    async def run(self) -> None:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.asked = True


@asynccontextmanager
async def kept(*tasks: Task) -> AsyncIterator[None]:
    stop = asyncio.Event()
    keeping_them = asyncio.create_task(run_tasks(tasks, stop, process="monitor", first_wait_seconds=0.001))
    try:
        yield
    finally:
        stop.set()
        await keeping_them


async def test_a_failed_task_is_restarted_and_does_not_end_the_others() -> None:
    failing, steady = Failing(), Steady()

    async with kept(failing, steady):
        await until(lambda: failing.times >= 3)
        assert not steady.ended

    assert steady.ended
    assert steady.times == 1


async def test_a_task_that_ends_by_a_stray_cancellation_is_restarted() -> None:
    cut_off = StrayCancel()

    async with kept(cut_off):
        await until(lambda: cut_off.times >= 3)


async def test_the_text_of_a_foreign_exception_is_not_logged() -> None:
    failing = Failing()

    with capture_logs() as logs:
        async with kept(failing):
            await until(lambda: failing.times)

    assert logs[0]["where"] == "monitor: Failing"
    assert logs[0]["error"].startswith("LookupError at test_services.py:")


async def test_a_task_that_ignores_cancellation_delays_the_exit_by_seconds_at_most() -> None:
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
    """A service whose first rounds raise the given exceptions, one exception per round."""

    interval_seconds = 0.001

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)
        self.rounds = 0

    async def run_once(self) -> None:
        self.rounds += 1
        if self.faults:
            raise self.faults.pop(0)


class Endless:
    """A service whose first round never ends."""

    interval_seconds = 0.001

    async def run_once(self) -> None:
        await asyncio.Event().wait()


async def test_an_outage_of_postgresql_is_logged_once_until_a_round_succeeds() -> None:
    away = [StoreUnavailable("PostgreSQL is away.") for _ in range(3)]
    service = Rounds(*away)

    with capture_logs() as logs:
        async with kept(Periodic(service)):
            await until(lambda: service.rounds > 4)
            service.faults.append(StoreUnavailable("PostgreSQL is away again."))
            await until(lambda: not service.faults)

    assert [log["reason"] for log in logs] == ["PostgreSQL is away.", "PostgreSQL is away again."]
    assert {log["event"] for log in logs} == {"store.connection_lost"}


async def test_a_failed_service_is_retried_and_a_slow_one_delays_no_other() -> None:
    failing, slow, steady = Rounds(LookupError("x")), Endless(), Rounds()

    with capture_logs() as logs:
        async with kept(Periodic(slow), Periodic(failing), Periodic(steady)):
            await until(lambda: failing.rounds > 2 and steady.rounds > 2)

    assert [log["where"] for log in logs] == ["monitor: Rounds"]


async def test_a_refused_statement_is_logged_once_until_a_round_succeeds_and_raises_nothing() -> None:
    refused = [StatementRefused("PostgreSQL refused a statement (22008).") for _ in range(3)]
    service = Rounds(*refused)
    step = Periodic(service)

    with capture_logs() as logs:
        while service.rounds < 4:
            await step.run_if_due()
        service.faults.append(StatementRefused("PostgreSQL refused a statement (XX001)."))
        while service.faults:
            await step.run_if_due()

    assert [(log["event"], log["service"], log["reason"][-8:-2]) for log in logs] == [
        ("service.refused", "Rounds", "(22008"),
        ("service.refused", "Rounds", "(XX001"),
    ]


async def test_a_statement_that_is_refused_after_an_outage_is_logged() -> None:
    service = Rounds(StoreUnavailable("PostgreSQL is away."), StatementRefused("PostgreSQL refused a statement."))

    with capture_logs() as logs:
        async with kept(Periodic(service)):
            await until(lambda: service.rounds > 2)

    assert [log["event"] for log in logs] == ["store.connection_lost", "service.refused"]


async def test_a_service_that_is_woken_begins_its_next_round_at_once() -> None:
    service = Rounds()
    service.interval_seconds = 3600
    step = Periodic(service)

    async with kept(step):
        await until(lambda: service.rounds == 1)
        step.woken.set()
        await until(lambda: service.rounds == 2)


async def test_run_if_due_runs_a_service_only_if_it_is_due() -> None:
    service = Rounds()
    service.interval_seconds = 3600
    step = Periodic(service)

    for _ in range(3):
        await step.run_if_due()

    assert service.rounds == 1


async def test_without_tasks_run_tasks_returns_at_the_stop() -> None:
    async with kept():
        pass
