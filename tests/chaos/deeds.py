"""What the adversary can do. Each deed says whether it was possible now: whether there was somebody to do it to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random
from typing import Final
from uuid import uuid4

import orjson
import pika.exceptions
import psycopg

from dispatcher.config import MOST_BUNDLED
from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.chaos.stage import Stage

Deed = Callable[[Stage, Random], bool]

_BROKEN: Final = (OSError, AssertionError, pika.exceptions.AMQPError, psycopg.Error)
"""What a server says that is just going away."""


def kill_worker(stage: Stage, random: Random) -> bool:
    """SIGKILL."""
    return _kill(stage, random, stage.subject.find("worker"))


def kill_relay(stage: Stage, random: Random) -> bool:
    """SIGKILL."""
    return _kill(stage, random, stage.subject.find("relay"))


def kill_parent(stage: Stage, random: Random) -> bool:
    """SIGKILL; its children notice, and the next one starts at once."""
    if not stage.subject.is_running:
        return False
    stage.subject.kill()
    return True


def kill_all(stage: Stage, random: Random) -> bool:
    """SIGKILL to the parent and all of its children, within a moment."""
    children = stage.subject.find("")
    if not kill_parent(stage, random):
        return False
    for pid in children:
        with suppress(ProcessLookupError):
            stage.diary.kill(pid)
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
    awake = [pid for pid in stage.subject.find(role) if pid not in stage.diary.frozen]
    with suppress(ProcessLookupError, IndexError):
        pid = random.choice(awake)
        stage.diary.freeze(pid)
        stage.later(stage.lease_seconds * random.uniform(1.1, 2.0), lambda: stage.diary.thaw(pid))
        return True
    return False


def end_worker(stage: Stage, random: Random) -> bool:
    """SIGTERM to one worker: it drains, and is replaced."""
    with suppress(ProcessLookupError, IndexError):
        os.kill(random.choice(stage.subject.find("worker")), signal.SIGTERM)
        return True
    return False


def restart_run(stage: Stage, random: Random) -> bool:
    """SIGTERM to the parent: everything drains, and the next one starts."""
    if not stage.subject.is_running or stage.subject.was_asked_to_end:
        return False
    stage.subject.ask_to_end()
    return True


def reload_run(stage: Stage, random: Random) -> bool:
    """SIGHUP to the parent: every process is replaced, one after the other."""
    return stage.subject.send(signal.SIGHUP)


def add_worker(stage: Stage, random: Random) -> bool:
    """SIGTTIN to the parent, and SIGTTOU after a while: one worker more, and one less."""
    if not stage.subject.send(signal.SIGTTIN):
        return False
    stage.later(random.uniform(0.5, 5), lambda: stage.subject.send(signal.SIGTTOU))
    return True


def cut_connections(stage: Stage, random: Random) -> bool:
    """Some of the connections to RabbitMQ, by the operator's hand."""
    if stage.outages.is_away(RABBITMQ):
        return False
    names: tuple[str, ...] = ("dispatcher ",)
    if stage.shares_broker:
        names = tuple(f"dispatcher {worker}" for worker in _connected_workers(stage))
    with suppress(*_BROKEN):
        return bool(names) and stage.rabbit.close_connections(*names, chosen=lambda: random.random() < 0.7) > 0
    return False


def _connected_workers(stage: Stage) -> list[str]:
    """The identities of our own workers, by their ledgers."""
    pids = {str(pid) for pid in stage.subject.find("worker")}
    names = [path.stem for path in stage.subject.run_dir.glob("*.ledger")]
    return [name for name in names if name.split(":")[-2] in pids]


def restart_broker(stage: Stage, random: Random) -> bool:
    """SIGKILL or SIGTERM to RabbitMQ, and another one at once."""
    if RABBITMQ not in stage.outages.removable or not stage.outages.is_over:
        return False
    stage.outages.take_away(RABBITMQ, random.choice([signal.SIGKILL, signal.SIGTERM]), 0.0)
    return True


def alarm_broker(stage: Stage, random: Random) -> bool:
    """RabbitMQ's memory alarm."""
    if RABBITMQ not in stage.outages.removable or not stage.outages.is_over:
        return False
    stage.outages.raise_alarm(random.uniform(2, 5))
    return True


def purge_queue(stage: Stage, random: Random) -> bool:
    """Throws away the messages that wait: the database is the truth."""
    if stage.outages.is_away(RABBITMQ):
        return False
    with suppress(*_BROKEN):
        stage.rabbit.purge(stage.topology.queue)
        return True
    return False


def cut_sessions(stage: Stage, random: Random) -> bool:
    """Some of the sessions of our database, whatever they are doing."""
    statement = """
        select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
            and random() < 0.6
    """
    if stage.outages.is_away(POSTGRES):
        return False
    with suppress(psycopg.Error), psycopg.connect(stage.database_url, autocommit=True, connect_timeout=2) as session:
        row = session.execute(statement).fetchone()
        return row is not None and row[0] > 0
    return False


def restart_database(stage: Stage, random: Random) -> bool:
    """PostgreSQL's immediate shutdown, or its kill, and its return after a moment."""
    if POSTGRES not in stage.outages.removable or stage.outages.is_away(POSTGRES):
        return False
    stage.outages.take_away(POSTGRES, random.choice([signal.SIGQUIT, signal.SIGKILL]), random.uniform(0, 2.5))
    return True


def inject_duplicates(stage: Stage, random: Random) -> bool:
    """Messages of emails that there are, a second time, and up to five times; then all of them in one message, some
    twice, and all of them beside one that there is not: that message ends on the DLQ, and its emails do not."""
    statement = "select email_id, message_key from email_log order by email_id desc limit 400"
    if stage.outages.is_away(POSTGRES) or not _takes_messages(stage):
        return False
    with suppress(*_BROKEN), psycopg.connect(stage.database_url, autocommit=True, connect_timeout=2) as session:
        rows = session.execute(statement).fetchall()
        chosen = random.sample(rows, min(len(rows), 30))
        bodies = [_pointer(str(i), key) for i, key in chosen for _ in range(random.randint(1, 5))]
        pointers = [{"email_id": str(i), "message_key": key} for i, key in chosen]
        nobody = {"email_id": str(uuid4()), "message_key": "nobody"}
        beside_nobody = _bundle([*pointers[:15], nobody, *pointers[15:]])
        stage.diary.garbage.add(beside_nobody)
        bodies += [_bundle(random.choices(pointers, k=MOST_BUNDLED)), beside_nobody] if pointers else []
        stage.rabbit.publish(stage.topology.queue, *bodies)
        return bool(bodies)
    return False


def inject_garbage(stage: Stage, random: Random) -> bool:
    """Messages that point to nothing."""
    if not _takes_messages(stage):
        return False
    nobody = str(uuid4())
    bodies = (
        b"", b"\xff\x00", b"[]", b"{}", b"x" * 70_000, b"[" * 20_000, b'{"v":2}',
        _pointer(nobody, "nobody"), _pointer("no-uuid", "nobody"), _pointer(nobody, "a\0b"), _pointer(nobody, ""),
        _bundle([]), _bundle([{}]), _bundle([[]]), _bundle("emails"), _bundle([{"v": 2, "emails": []}]),
        _bundle([{"email_id": nobody, "message_key": "nobody"}] * (MOST_BUNDLED + 1)),
        _bundle([{"email_id": nobody, "message_key": "nobody"}] * MOST_BUNDLED),
    )  # fmt: skip
    # Noted before: nobody may hear that the broker took them.
    stage.diary.garbage.update(bodies)
    properties = random.choice([None, pika.BasicProperties(headers={"traceparent": 3, "x": {"y": [1]}})])
    with suppress(*_BROKEN):
        stage.rabbit.publish(stage.topology.queue, *bodies, properties=properties)
        return True
    return False


def _takes_messages(stage: Stage) -> bool:
    return not stage.outages.is_away(RABBITMQ) and not stage.outages.is_alarmed


def _pointer(email_id: str, message_key: str) -> bytes:
    return orjson.dumps({"v": 1, "email_id": email_id, "message_key": message_key})


def _bundle(emails: object) -> bytes:
    return orjson.dumps({"v": 2, "emails": emails})


def provider(**behaviour: object) -> Deed:
    """The provider behaves so for a while; see `dispatcher.dev.http_behaviour`."""

    def misbehave(stage: Stage, random: Random) -> bool:
        stage.behave(**behaviour)
        stage.later(random.uniform(0.5, 2.5), stage.behave)
        return True

    return misbehave


DECK: Final[Mapping[str, tuple[Deed, int]]] = {
    "kill worker": (kill_worker, 7),
    "kill relay": (kill_relay, 6),
    "kill parent": (kill_parent, 4),
    "kill all": (kill_all, 1),
    "kill producer": (kill_producer, 4),
    "freeze worker": (freeze_worker, 2),
    "freeze relay": (freeze_relay, 1),
    "end worker": (end_worker, 1),
    "restart run": (restart_run, 1),
    "reload run": (reload_run, 1),
    "add worker": (add_worker, 1),
    "cut connections": (cut_connections, 2),
    "restart broker": (restart_broker, 1),
    "alarm broker": (alarm_broker, 1),
    "purge queue": (purge_queue, 1),
    "cut sessions": (cut_sessions, 2),
    "restart database": (restart_database, 2),
    "inject duplicates": (inject_duplicates, 2),
    "inject garbage": (inject_garbage, 1),
    "provider closes": (provider(act="close", times=3), 1),
    "provider resets": (provider(act="reset", times=3), 1),
    "provider forgets": (provider(act="forget", times=3), 1),
    "provider breaks off": (provider(act="half-head", times=3), 1),
    "provider hangs": (provider(act="hang", times=2), 1),
    "provider hangs up": (provider(act="last-answer", times=20), 1),
    "provider 500": (provider(reply={"status": 500}, times=6), 1),
    "provider 503": (provider(reply={"status": 503}, times=30), 1),
    "provider 400": (provider(reply={"status": 400}, times=3), 1),
    "provider 429": (provider(throttle_seconds=1.0), 1),
    "provider is late": (provider(latency_ms=1000), 1),
}
"""Every deed by its name, and how often it is in the deck that the adversary draws from."""

KILLS: Final = ("kill worker", "kill relay", "kill parent", "kill all", "kill producer")
"""Those that are a SIGKILL to one of our processes."""
