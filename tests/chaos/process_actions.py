"""The adversary's actions on our processes, on whole hosts, and on their ledgers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random

from tests.chaos.stage import Action, StormStage, short_or_long


def kill_one(pids: Callable[[StormStage], list[int]]) -> Action:

    def kill(stage: StormStage, random: Random) -> bool:
        with suppress(ProcessLookupError, IndexError):
            stage.diary.kill(random.choice(pids(stage)))
            return True
        return False

    return kill


def kill_parent(stage: StormStage, random: Random) -> bool:
    host = random.choice(stage.hosts)
    if not host.is_running:
        return False
    host.kill()
    return True


def kill_host(stage: StormStage, random: Random) -> bool:
    host = random.choice(stage.hosts)
    children = host.find("")
    if not host.is_running:
        return False
    host.kill()
    for pid in children:
        with suppress(ProcessLookupError):
            stage.diary.kill(pid)
    return True


def freeze_one(role: str) -> Action:
    """An action that sends SIGSTOP to a process, and SIGCONT after the process's leases have expired."""

    def freeze(stage: StormStage, random: Random) -> bool:
        awake = _awake(stage, stage.find(role))
        seconds = stage.plan.lease_seconds * random.uniform(1.1, 2.0)
        return _freeze(stage, random.sample(awake, min(1, len(awake))), seconds)

    return freeze


def freeze_host(stage: StormStage, random: Random) -> bool:
    """Send SIGSTOP to all processes of a host. Send SIGCONT shortly after, or only after other hosts have recovered the
    frozen host's leases."""
    return _freeze(stage, _awake(stage, random.choice(stage.hosts).members()), short_or_long(stage, random))


def _awake(stage: StormStage, pids: list[int]) -> list[int]:
    return [pid for pid in pids if pid not in stage.diary.frozen]


def _freeze(stage: StormStage, pids: list[int], seconds: float) -> bool:
    for pid in pids:
        with suppress(ProcessLookupError):
            stage.diary.freeze(pid)
            stage.later(seconds, partial(stage.diary.thaw, pid))
    return bool(pids)


def end_worker(stage: StormStage, random: Random) -> bool:
    with suppress(ProcessLookupError, IndexError):
        os.kill(random.choice(stage.find("worker")), signal.SIGTERM)
        return True
    return False


def restart_run(stage: StormStage, random: Random) -> bool:
    host = random.choice(stage.hosts)
    if not host.is_running or host.is_stopping:
        return False
    host.begin_stop()
    return True


def reload_run(stage: StormStage, random: Random) -> bool:
    return random.choice(stage.hosts).send(signal.SIGHUP)


def add_worker(stage: StormStage, random: Random) -> bool:
    host = random.choice(stage.hosts)
    if not host.send(signal.SIGTTIN):
        return False
    stage.later(random.uniform(0.5, 5), lambda: host.send(signal.SIGTTOU))
    return True


def delete_ledger(stage: StormStage, random: Random) -> bool:
    """Delete the ledger of a running worker. This action may kill the worker soon after; otherwise a different action
    may kill it later."""
    host = random.choice(stage.hosts)
    workers = host.workers()
    seconds = random.choice([0.0, random.uniform(0.0, 2.0), None])
    if not workers:
        return False
    worker = random.choice(sorted(workers))
    stage.diary.ledgerless[worker] = workers[worker]
    (host.run_dir / f"{worker}.ledger").unlink(missing_ok=True)

    def kill() -> None:
        with suppress(ProcessLookupError):
            stage.diary.kill(workers[worker])

    if seconds is not None:
        stage.later(seconds, kill)
    return True


def kill_api(stage: StormStage, random: Random) -> bool:
    return stage.reporter is not None and stage.reporter.source.kill()
