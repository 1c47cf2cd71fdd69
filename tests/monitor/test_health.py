"""Tests each check of /readyz, which uses the results of the monitor's last polls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings, load
from dispatcher.domain.controls import Pause, PauseScope
from dispatcher.domain.status import Status
from dispatcher.errors import BrokerUnavailable, DispatcherError, SchemaError, StoreUnavailable, TopologyError
from dispatcher.host.process_table import ProcessStatus
from dispatcher.monitor.health import CHECKS, Health
from dispatcher.monitor.polling import Poll, interval_after
from dispatcher.store.figures import MonitorCounts
from dispatcher.telemetry.scrape import ProcessCollector
from tests.telemetry.counting import counting

COUNTS = MonitorCounts({Status.PENDING: 1}, 10.0, 0.5, 0.0, 0.0, {})
SETTINGS = load({"DISPATCHER_READY_PENDING_SECONDS": "60"})
WORKER = ProcessStatus("worker", 0, 1, is_up=True, is_ending=False, failed_boots=0, beats=1)
SEND_QUEUES = [SETTINGS.queue_of(lane) for lane in SETTINGS.lanes]
QUEUES = {**dict.fromkeys(SEND_QUEUES, FoundQueue(3, 2)), SETTINGS.dlq: FoundQueue(0, 0)}


class Answered(Poll[Any]):
    def __init__(self, value: object) -> None:
        async def ask() -> object:
            if isinstance(value, DispatcherError):
                raise value
            return value

        super().__init__(ask)


async def reasons(
    folder: Path,
    counts: object = COUNTS,
    queues: object = QUEUES,
    settings: Settings = SETTINGS,
    unready: Sequence[str] = (),
    members: Sequence[ProcessStatus] = (),
) -> dict[str, str]:
    store = counts if isinstance(counts, Poll) else Answered(counts)
    broker = Answered(queues)
    await store.ask()
    await broker.ask()
    processes = ProcessCollector(folder)
    found = Health(settings, store, broker, processes, lambda: list(unready), lambda: list(members)).reasons()
    assert tuple(found) == CHECKS
    return {name: reason for name, reason in found.items() if reason is not None}


def test_no_host_is_ready_before_the_servers_have_answered(tmp_path: Path) -> None:
    health = Health(SETTINGS, Answered(COUNTS), Answered(QUEUES), ProcessCollector(tmp_path), list, list)

    assert [name for name, reason in health.reasons().items() if reason] == ["database", "broker"]


@pytest.mark.parametrize(
    ("counts", "queues", "failing"),
    [
        (StoreUnavailable("no route to db.internal as user bob"), QUEUES, "database"),
        (SchemaError("The database lacks 1 migration."), QUEUES, "schema"),
        (COUNTS, BrokerUnavailable("refused for user bob"), "broker"),
        (COUNTS, TopologyError('RabbitMQ has no queue "x".'), "topology"),
        (COUNTS, {**QUEUES, **dict.fromkeys(SEND_QUEUES, FoundQueue(3, 0))}, "consumers"),
        (COUNTS, {**QUEUES, SETTINGS.queue_of("bulk"): FoundQueue(3, 0)}, "consumers"),
        (replace(COUNTS, is_blocked=True), QUEUES, "confirms"),
        (replace(COUNTS, oldest_pending_seconds=61.0), QUEUES, "pending"),
        (replace(COUNTS, oldest_pending_seconds=-3500.0), QUEUES, "pending"),
    ],
)
async def test_each_fault_fails_only_its_check(tmp_path: Path, counts: object, queues: object, failing: str) -> None:
    found = await reasons(tmp_path, counts, queues)

    assert list(found) == [failing]
    assert "bob" not in found[failing]


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, None),
        ({"commit_wait_seconds": 5.0}, None),
        ({"commit_wait_seconds": 21.0}, "commits"),
        ({"commit_wait_seconds": 21.0, "is_ending": True}, None),
        ({"role": "relay", "confirm_wait_seconds": 21.0}, "confirms"),
    ],
)
async def test_a_host_whose_commits_or_confirms_hang_is_not_ready(
    tmp_path: Path, changes: dict[str, Any], failing: str | None
) -> None:
    found = await reasons(tmp_path, members=[WORKER, replace(WORKER, **changes)])

    assert list(found) == ([failing] if failing else [])
    assert failing != "confirms" or "for RabbitMQ's confirms for 21 s." in found["confirms"]


async def test_a_process_that_cannot_start_makes_its_host_unready(tmp_path: Path) -> None:
    plights = ("worker 0 could not boot, 3 times in a row.", "relay is starting.")

    assert await reasons(tmp_path, unready=plights) == {"processes": " ".join(plights)}


@pytest.mark.parametrize(("served", "is_well"), [(3.0, True), (30.0, False), (None, False)])
async def test_recent_acks_outweigh_a_failed_poll(tmp_path: Path, served: float | None, *, is_well: bool) -> None:
    late = DispatcherError("No answer came within 15 s.")
    nobody = {**QUEUES, **dict.fromkeys(SEND_QUEUES, FoundQueue(0, 0))}
    members = [WORKER, replace(WORKER, served_seconds=served)]

    assert (await reasons(tmp_path, COUNTS, late, members=members) == {}) is is_well
    assert (await reasons(tmp_path, COUNTS, nobody, members=members) == {}) is is_well


@pytest.mark.parametrize(
    ("scope", "name", "is_well"),
    [("all", "", True), ("lane", "normal", True), ("provider", "smtp", True), ("provider", "ses", False)],
)
async def test_what_an_operator_paused_fails_no_check(tmp_path: Path, scope: str, name: str, *, is_well: bool) -> None:
    settings = replace(SETTINGS, providers=("smtp",))
    pauses = (Pause(PauseScope(scope), name, None, "maintenance", "ann", datetime.now(UTC)),)
    # A pause of everything or of a lane leaves its emails out of the age (see find_oldest_pending).
    counts = replace(COUNTS, pauses=pauses, oldest_pending_seconds=61.0 if scope == "provider" else None)
    idle = {**QUEUES, SETTINGS.queue: FoundQueue(3, 0)}
    with counting(tmp_path, "w0") as worker:
        worker.tell("breaker smtp open" if scope == "provider" else "breaker smtp closed")

        found = await reasons(tmp_path, counts, idle, settings)

    assert list(found) == ([] if is_well else ["consumers", "providers", "pending"])


@pytest.mark.parametrize(
    ("ses", "smtp", "is_well"), [("closed", "open", True), ("open", "open", False), ("open", "half_open", False)]
)
async def test_a_host_is_not_ready_while_all_breakers_of_all_workers_are_open(
    tmp_path: Path, ses: str, smtp: str, *, is_well: bool
) -> None:
    with counting(tmp_path, "w0") as first, counting(tmp_path, "w1") as second:
        first.tell("breaker smtp open")
        first.tell(f"breaker ses {ses}")
        second.tell(f"breaker smtp {smtp}")

        fault = {"providers": "No provider is usable; circuit breakers are open: ses, smtp."}
        assert await reasons(tmp_path) == ({} if is_well else fault)

    assert await reasons(tmp_path) == {}


async def test_a_poll_without_an_answer_in_time_fails() -> None:
    async def silent() -> MonitorCounts:
        raise TimeoutError

    look: Poll[MonitorCounts] = Poll(silent)
    await look.ask()

    assert (look.found, look.age_seconds) == (None, None)
    assert "No answer came" in str(look.fault)


@pytest.mark.parametrize(("answer_seconds", "interval"), [(0.01, 5.0), (0.5, 10.0), (3.0, 60.0), (15.0, 60.0)])
def test_a_slow_server_is_polled_less_often_but_at_least_each_minute(answer_seconds: float, interval: float) -> None:
    assert interval_after(answer_seconds, shortest=5.0) == interval


@pytest.mark.parametrize(
    ("interval", "age", "is_heard"), [(5.0, 29.0, True), (5.0, 31.0, False), (60.0, 70.0, True), (60.0, 80.0, False)]
)
async def test_a_slow_servers_answer_may_be_older(tmp_path: Path, interval: float, age: float, is_heard: bool) -> None:
    class Aged(Answered):
        age_seconds = age

    store = Aged(COUNTS)
    store.interval_seconds = interval

    assert set(await reasons(tmp_path, store)) == (set() if is_heard else {"database"})
