"""What the adversary does to our processes, to whole hosts and to their ledgers."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from random import Random

from tests.chaos.deed import short_or_long
from tests.chaos.stage import Stage
from tests.chaos.subject import Subject


def kill_worker(stage: Stage, random: Random) -> bool:
    """SIGKILL."""
    return _kill(stage, random, stage.find("worker"))


def kill_relay(stage: Stage, random: Random) -> bool:
    """SIGKILL."""
    return _kill(stage, random, stage.find("relay"))


def kill_parent(stage: Stage, random: Random) -> bool:
    """SIGKILL; its children notice, and the next one starts at once."""
    return _kill_parent(random.choice(stage.hosts))


def kill_host(stage: Stage, random: Random) -> bool:
    """SIGKILL to the parent and all of its children, within a moment."""
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


def kill_producer(stage: Stage, random: Random) -> bool:
    """SIGKILL, perhaps between its commit and its being told."""
    return _kill(stage, random, stage.producers.pids())


def _kill(stage: Stage, random: Random, pids: list[int]) -> bool:
    with suppress(ProcessLookupError, IndexError):
        stage.diary.kill(random.choice(pids))
        return True
    return False


def freeze_worker(stage: Stage, random: Random) -> bool:
    """SIGSTOP, and SIGCONT when its leases are over."""
    return _freeze(stage, random, "worker")


def freeze_relay(stage: Stage, random: Random) -> bool:
    """The same to the relay."""
    return _freeze(stage, random, "relay")


def _freeze(stage: Stage, random: Random, role: str) -> bool:
    awake = [pid for pid in stage.find(role) if pid not in stage.diary.frozen]
    with suppress(ProcessLookupError, IndexError):
        _freeze_one(stage, random.choice(awake), stage.lease_seconds * random.uniform(1.1, 2.0))
        return True
    return False


def freeze_host(stage: Stage, random: Random) -> bool:
    """SIGSTOP to everybody of a host, and SIGCONT after a moment, or when others have judged its leases."""
    host = random.choice(stage.hosts)
    seconds = short_or_long(stage, random)
    awake = [pid for pid in host.members() if pid not in stage.diary.frozen]
    for pid in awake:
        with suppress(ProcessLookupError):
            _freeze_one(stage, pid, seconds)
    return bool(awake)


def _freeze_one(stage: Stage, pid: int, seconds: float) -> None:
    stage.diary.freeze(pid)
    stage.later(seconds, lambda: stage.diary.thaw(pid))


def end_worker(stage: Stage, random: Random) -> bool:
    """SIGTERM to one worker: it drains, and is replaced."""
    with suppress(ProcessLookupError, IndexError):
        os.kill(random.choice(stage.find("worker")), signal.SIGTERM)
        return True
    return False


def restart_run(stage: Stage, random: Random) -> bool:
    """SIGTERM to the parent: everything drains, and the next one starts."""
    host = random.choice(stage.hosts)
    if not host.is_running or host.was_asked_to_end:
        return False
    host.ask_to_end()
    return True


def reload_run(stage: Stage, random: Random) -> bool:
    """SIGHUP to the parent: every process is replaced, one after the other."""
    return random.choice(stage.hosts).send(signal.SIGHUP)


def add_worker(stage: Stage, random: Random) -> bool:
    """SIGTTIN to the parent, and SIGTTOU after a while: one worker more, and one less."""
    host = random.choice(stage.hosts)
    if not host.send(signal.SIGTTIN):
        return False
    stage.later(random.uniform(0.5, 5), lambda: host.send(signal.SIGTTOU))
    return True


def delete_ledger(stage: Stage, random: Random) -> bool:
    """The ledger of a living worker is gone; then its worker, soon, or when something else strikes it."""
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
