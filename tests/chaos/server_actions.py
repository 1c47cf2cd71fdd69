"""The adversary's actions on PostgreSQL and RabbitMQ, and on the network between them and a host."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from random import Random

import psycopg

from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.chaos.stage import BROKEN, Action, StormStage, rows_of, short_or_long
from tests.chaos.subject import Network


def cut_connections(stage: StormStage, random: Random) -> bool:
    if stage.outages.is_away(RABBITMQ):
        return False
    names: tuple[str, ...] = ("dispatcher ",)
    if stage.ground.shares_broker:
        names = tuple(f"dispatcher {worker}" for host in stage.hosts for worker in host.workers())
    with suppress(*BROKEN):
        return bool(names) and stage.rabbit.close_connections(*names, chosen=lambda: random.random() < 0.7) > 0
    return False


def restart_broker(stage: StormStage, random: Random) -> bool:
    if RABBITMQ not in stage.outages.stoppable or not stage.outages.is_over:
        return False
    stage.outages.stop(RABBITMQ, random.choice([signal.SIGKILL, signal.SIGTERM]), 0.0)
    return True


def alarm_broker(stage: StormStage, random: Random) -> bool:
    if RABBITMQ not in stage.outages.stoppable or not stage.outages.is_over:
        return False
    stage.outages.raise_alarm(random.uniform(2, 5))
    return True


def cut_sessions(stage: StormStage, random: Random) -> bool:
    statement = """
        select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
            and random() < 0.6
    """
    return any(count > 0 for (count,) in rows_of(stage, statement))


def restart_database(stage: StormStage, random: Random) -> bool:
    if POSTGRES not in stage.outages.stoppable or stage.outages.is_away(POSTGRES):
        return False
    stage.wake()
    stage.outages.stop(POSTGRES, random.choice([signal.SIGQUIT, signal.SIGKILL]), random.uniform(0, 2.5))
    return True


def hang_backend(stage: StormStage, random: Random) -> bool:
    return _hang_one(stage, random, "dispatcher relay", *_workers(stage))


def hang_backend_of_dead(stage: StormStage, random: Random) -> bool:
    workers = _workers(stage)
    if not workers:
        return False
    worker = random.choice(list(workers))
    if not _hang_one(stage, random, worker):
        return False
    with suppress(ProcessLookupError):
        stage.diary.kill(workers[worker])
    return True


def _hang_one(stage: StormStage, random: Random, *names: str) -> bool:
    statement = """
        select pid from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and application_name = any(%s)
        order by pid
    """
    seconds = short_or_long(stage, random)
    pids = [] if stage.has_hung else [pid for (pid,) in rows_of(stage, statement, list(names))]
    with suppress(ProcessLookupError, IndexError):
        stage.hang(random.choice(pids), seconds)
        return True
    return False


def _workers(stage: StormStage) -> dict[str, int]:
    return {worker: pid for host in stage.hosts for worker, pid in host.workers().items()}


def step_clock(stage: StormStage, random: Random) -> bool:
    ahead = random.choice([-1, 1]) * random.uniform(stage.plan.lease_seconds * 1.5, 30)
    seconds = random.uniform(1, 5)
    if stage.outages.is_away(POSTGRES) or not _set_clock(stage, ahead):
        return False
    stage.later(seconds, lambda: _set_clock(stage, 0))
    return True


def _set_clock(stage: StormStage, ahead: float) -> bool:
    try:
        stage.clock.set(ahead)
    except psycopg.Error:
        if not ahead:
            stage.later(0.5, lambda: _set_clock(stage, 0))
        return False
    stage.diary.note_event("clock", ahead=ahead)
    return True


def cut_network(*names: str) -> Action:
    return _away(names, Network.cut)


def black_hole(*names: str) -> Action:
    return _away(names, Network.black_hole)


def _away(names: Collection[str], part: Callable[[Network, Collection[str]], None]) -> Action:
    def action(stage: StormStage, random: Random) -> bool:
        reachable = [host for host in stage.hosts if host.network is not None and not host.network.away]
        seconds = short_or_long(stage, random)
        if not reachable:
            return False
        host = random.choice(reachable)
        network = host.network
        assert network is not None
        part(network, names)
        stage.later(seconds, network.heal)
        return True

    return action
