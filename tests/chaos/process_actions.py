"""The adversary's actions on our processes, on whole hosts, and on their ledgers."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from random import Random

from tests.chaos.action import short_or_long
from tests.chaos.stage import StormStage
from tests.chaos.subject import Subject


def kill_worker(stage: StormStage, random: Random) -> bool:
    """Send SIGKILL to a worker."""
    return _kill(stage, random, stage.find("worker"))


def kill_relay(stage: StormStage, random: Random) -> bool:
    """Send SIGKILL to a relay."""
    return _kill(stage, random, stage.find("relay"))


def kill_parent(stage: StormStage, random: Random) -> bool:
    """Send SIGKILL to a parent. Its children detect this and exit. The next parent starts immediately."""
    return _kill_parent(random.choice(stage.hosts))


def kill_host(stage: StormStage, random: Random) -> bool:
    """Send SIGKILL to a parent and all of its children, within a moment."""
    host = random.choice(stage.hosts)
    children = host.find("")
    if not _kill_parent(host):
        return False
    for pid in children:
        with suppress(ProcessLookupError):
            stage.diary.kill(pid)
    return True


def _kill_parent(host: Subject) -> bool:
    if not host.is_running:
        return False
    host.kill()
    return True


def kill_producer(stage: StormStage, random: Random) -> bool:
    """Send SIGKILL to a producer, possibly between a commit and the answer."""
    return _kill(stage, random, stage.producers.pids())


def _kill(stage: StormStage, random: Random, pids: list[int]) -> bool:
    with suppress(ProcessLookupError, IndexError):
        stage.diary.kill(random.choice(pids))
        return True
    return False


def freeze_worker(stage: StormStage, random: Random) -> bool:
    """Send SIGSTOP to a worker, and SIGCONT after the worker's leases have expired."""
    return _freeze(stage, random, "worker")


def freeze_relay(stage: StormStage, random: Random) -> bool:
    """Send SIGSTOP to a relay, and SIGCONT later."""
    return _freeze(stage, random, "relay")


def _freeze(stage: StormStage, random: Random, role: str) -> bool:
    awake = [pid for pid in stage.find(role) if pid not in stage.diary.frozen]
    with suppress(ProcessLookupError, IndexError):
        _freeze_one(stage, random.choice(awake), stage.lease_seconds * random.uniform(1.1, 2.0))
        return True
    return False


def freeze_host(stage: StormStage, random: Random) -> bool:
    """Send SIGSTOP to all processes of a host. Send SIGCONT shortly after, or only after other hosts have recovered the
    frozen host's leases."""
    host = random.choice(stage.hosts)
    seconds = short_or_long(stage, random)
    awake = [pid for pid in host.members() if pid not in stage.diary.frozen]
    for pid in awake:
        with suppress(ProcessLookupError):
            _freeze_one(stage, pid, seconds)
    return bool(awake)


def _freeze_one(stage: StormStage, pid: int, seconds: float) -> None:
    stage.diary.freeze(pid)
    stage.later(seconds, lambda: stage.diary.thaw(pid))


def end_worker(stage: StormStage, random: Random) -> bool:
    """Send SIGTERM to one worker, which drains and is replaced."""
    with suppress(ProcessLookupError, IndexError):
        os.kill(random.choice(stage.find("worker")), signal.SIGTERM)
        return True
    return False


def restart_run(stage: StormStage, random: Random) -> bool:
    """Send SIGTERM to the parent. All processes drain, and the next parent starts."""
    host = random.choice(stage.hosts)
    if not host.is_running or host.is_stopping:
        return False
    host.begin_stop()
    return True


def reload_run(stage: StormStage, random: Random) -> bool:
    """Send SIGHUP to the parent, which replaces its processes one after the other."""
    return random.choice(stage.hosts).send(signal.SIGHUP)


def add_worker(stage: StormStage, random: Random) -> bool:
    """Send SIGTTIN to the parent, which adds a worker. After a while, send SIGTTOU, which removes a worker."""
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
    pid = workers[worker]
    stage.diary.ledgerless[worker] = pid
    (host.run_dir / f"{worker}.ledger").unlink(missing_ok=True)

    def kill() -> None:
        with suppress(ProcessLookupError):
            stage.diary.kill(pid)

    if seconds is not None:
        stage.later(seconds, kill)
    return True
