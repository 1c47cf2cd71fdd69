"""Whether a host can do its work: each check alone, from what the monitor has last heard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings, load
from dispatcher.domain.status import Status
from dispatcher.errors import BrokerUnavailable, DispatcherError, SchemaError, StoreUnavailable, TopologyError
from dispatcher.host.process_table import ProcessStatus
from dispatcher.monitor.health import CHECKS, Health
from dispatcher.monitor.looking import Poll, interval_after
from dispatcher.store.counts import Stock
from dispatcher.telemetry.scrape import ProcessCollector
from tests.telemetry.counting import counting

STOCK = Stock({Status.PENDING: 1}, 10.0, 0.5, 0.0, 0.0)
SETTINGS = load({"DISPATCHER_READY_PENDING_SECONDS": "60"})
WORKER = ProcessStatus("worker", 0, 1, is_up=True, is_ending=False, failed_boots=0, beats=1)
QUEUES = {SETTINGS.queue: FoundQueue(3, 2), SETTINGS.dlq: FoundQueue(0, 0)}


def answer(value: object) -> Callable[[], Awaitable[object]]:
    async def ask() -> object:
        if isinstance(value, DispatcherError):
            raise value
        return value

    return ask


async def reasons(
    folder: Path,
    stock: object = STOCK,
    queues: object = QUEUES,
    settings: Settings = SETTINGS,
    *unready: str,
    members: Sequence[ProcessStatus] = (),
) -> dict[str, str]:
    """What does not hold, by check, once the servers have answered so."""
    store: Poll[Stock] = Poll(answer(stock))  # type: ignore[arg-type]
    broker: Poll[dict[str, FoundQueue]] = Poll(answer(queues))  # type: ignore[arg-type]
    await store.ask()
    await broker.ask()
    processes = ProcessCollector(folder)
    found = Health(settings, store, broker, processes, lambda: list(unready), lambda: list(members)).reasons()
    assert tuple(found) == CHECKS
    return {name: reason for name, reason in found.items() if reason is not None}


async def test_a_host_whose_servers_answer_well_is_ready(tmp_path: Path) -> None:
    assert await reasons(tmp_path) == {}


async def test_nobody_is_ready_before_the_servers_have_answered(tmp_path: Path) -> None:
    health = Health(SETTINGS, Poll(answer(STOCK)), Poll(answer(QUEUES)), ProcessCollector(tmp_path), list, list)  # type: ignore[arg-type]

    assert [name for name, reason in health.reasons().items() if reason] == ["database", "broker"]


@pytest.mark.parametrize(
    ("stock", "queues", "failing"),
    [
        (StoreUnavailable("no route to db.internal as user bob"), QUEUES, "database"),
        (SchemaError("The database lacks 1 migration."), QUEUES, "schema"),
        (STOCK, BrokerUnavailable("refused for user bob"), "broker"),
        (STOCK, TopologyError('RabbitMQ has no queue "x".'), "topology"),
        (STOCK, {**QUEUES, SETTINGS.queue: FoundQueue(3, 0)}, "consumers"),
        (replace(STOCK, oldest_pending_seconds=61.0), QUEUES, "pending"),
        (replace(STOCK, oldest_pending_seconds=-3500.0), QUEUES, "pending"),
    ],
)
async def test_each_fault_fails_its_check_alone(tmp_path: Path, stock: object, queues: object, failing: str) -> None:
    found = await reasons(tmp_path, stock, queues)

    assert list(found) == [failing]
    assert "bob" not in found[failing]


async def test_a_process_that_cannot_boot_makes_its_host_unready(tmp_path: Path) -> None:
    plights = ("worker 0 could not boot, 3 times in a row.", "relay is starting.")

    assert await reasons(tmp_path, STOCK, QUEUES, SETTINGS, *plights) == {"processes": " ".join(plights)}


@pytest.mark.parametrize(("waited", "failing"), [(None, []), (5.0, []), (21.0, ["commits"])])
async def test_a_host_that_gets_no_commit_is_not_ready(
    tmp_path: Path, waited: float | None, failing: list[str]
) -> None:
    waiting = replace(WORKER, commit_wait_seconds=waited)

    assert list(await reasons(tmp_path, members=[WORKER, waiting])) == failing
    assert await reasons(tmp_path, members=[replace(waiting, is_ending=True)]) == {}


async def test_a_host_whose_relay_gets_no_confirm_is_not_ready(tmp_path: Path) -> None:
    relay = replace(WORKER, role="relay", confirm_wait_seconds=21.0)

    found = await reasons(tmp_path, members=[WORKER, relay])

    assert found == {"confirms": "A process of this host has waited for RabbitMQ's confirms for 21 s."}


@pytest.mark.parametrize(("served", "is_well"), [(3.0, True), (30.0, False), (None, False)])
async def test_acks_that_flow_outweigh_a_look_that_failed(
    tmp_path: Path, served: float | None, *, is_well: bool
) -> None:
    late, nobody = DispatcherError("No answer came within 15 s."), {**QUEUES, SETTINGS.queue: FoundQueue(0, 0)}
    members = [WORKER, replace(WORKER, served_seconds=served)]

    assert (await reasons(tmp_path, STOCK, late, members=members) == {}) is is_well
    assert (await reasons(tmp_path, STOCK, nobody, members=members) == {}) is is_well


async def test_no_pending_email_is_no_old_one(tmp_path: Path) -> None:
    assert await reasons(tmp_path, replace(STOCK, oldest_pending_seconds=None)) == {}


async def test_a_host_is_ready_while_one_provider_may_be_tried(tmp_path: Path) -> None:
    with counting(tmp_path, "w0") as first, counting(tmp_path, "w1") as second:
        first.tell("breaker smtp open")
        first.tell("breaker ses closed")
        second.tell("breaker smtp open")

        assert await reasons(tmp_path) == {}


@pytest.mark.parametrize("state", ["open", "half_open"])
async def test_a_host_is_not_ready_while_all_workers_see_all_providers_fail(tmp_path: Path, state: str) -> None:
    with counting(tmp_path, "w0") as first, counting(tmp_path, "w1") as second:
        first.tell("breaker smtp open")
        first.tell("breaker ses open")
        second.tell(f"breaker smtp {state}")

        assert await reasons(tmp_path) == {"providers": "Every provider fails as a whole: ses, smtp."}

    assert await reasons(tmp_path) == {}


async def test_a_server_that_does_not_answer_in_time_is_away(tmp_path: Path) -> None:
    async def silent() -> Stock:
        raise TimeoutError

    look: Poll[Stock] = Poll(silent)
    await look.ask()

    assert look.found is None
    assert look.age_seconds is None
    assert "No answer came" in str(look.fault)


@pytest.mark.parametrize(("answer_seconds", "interval"), [(0.01, 5.0), (0.5, 10.0), (3.0, 60.0), (15.0, 60.0)])
def test_a_slow_server_is_asked_less_often_and_each_minute_at_least(answer_seconds: float, interval: float) -> None:
    assert interval_after(answer_seconds, shortest=5.0) == interval


@pytest.mark.parametrize(
    ("interval", "age", "is_heard"), [(5.0, 29.0, True), (5.0, 31.0, False), (60.0, 70.0, True), (60.0, 80.0, False)]
)
async def test_an_answer_is_as_old_as_its_server_is_slow(
    tmp_path: Path, interval: float, age: float, is_heard: bool
) -> None:
    class AgedLook(Poll[Stock]):
        age_seconds = age

    store, broker = AgedLook(answer(STOCK)), Poll(answer(QUEUES))  # type: ignore[arg-type]
    store.interval_seconds = interval
    await store.ask()
    await broker.ask()

    found = Health(SETTINGS, store, broker, ProcessCollector(tmp_path), list, list).reasons()  # type: ignore[arg-type]

    assert {name for name, reason in found.items() if reason} == (set() if is_heard else {"database"})
