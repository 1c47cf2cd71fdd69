"""What the adversary can do. Each deed says whether it was possible now: whether there was somebody to do it to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from random import Random
from typing import Any, Final
from uuid import uuid4

import orjson
import pika.exceptions
import psycopg

from dispatcher.config import MOST_BUNDLED
from dispatcher.dev.smtp_script import Act, Step
from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.chaos.network import SERVERS, Network
from tests.chaos.stage import Stage
from tests.chaos.subject import Subject

Deed = Callable[[Stage, Random], bool]

BROKEN: Final = (OSError, AssertionError, pika.exceptions.AMQPError, psycopg.Error)
"""What a server says that is just going away."""


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
    seconds = _short_or_long(stage, random)
    awake = [pid for pid in host.members() if pid not in stage.diary.frozen]
    for pid in awake:
        with suppress(ProcessLookupError):
            _freeze_one(stage, pid, seconds)
    return bool(awake)


def _freeze_one(stage: Stage, pid: int, seconds: float) -> None:
    stage.diary.freeze(pid)
    stage.later(seconds, lambda: stage.diary.thaw(pid))


def _short_or_long(stage: Stage, random: Random) -> float:
    """A moment, or longer than a lease and the grace that its host has before another one judges it."""
    if random.random() < 0.5:
        return random.uniform(0.3, 2.0)
    return stage.lease_seconds * 1.5 + random.uniform(1.0, 4.0)


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


def cut_connections(stage: Stage, random: Random) -> bool:
    """Some of the connections to RabbitMQ, by the operator's hand."""
    if stage.outages.is_away(RABBITMQ):
        return False
    names: tuple[str, ...] = ("dispatcher ",)
    if stage.shares_broker:
        names = tuple(f"dispatcher {worker}" for host in stage.hosts for worker in host.workers())
    with suppress(*BROKEN):
        return bool(names) and stage.rabbit.close_connections(*names, chosen=lambda: random.random() < 0.7) > 0
    return False


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
    with suppress(*BROKEN):
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
    stage.wake()
    stage.outages.take_away(POSTGRES, random.choice([signal.SIGQUIT, signal.SIGKILL]), random.uniform(0, 2.5))
    return True


def inject_duplicates(stage: Stage, random: Random) -> bool:
    """Messages of emails that there are, a second time, and up to five times; then all of them in one message, some
    twice, and all of them beside one that there is not: that message ends on the DLQ, and its emails do not."""
    statement = "select email_id, message_key from email_log order by email_id desc limit 400"
    if stage.outages.is_away(POSTGRES) or not _takes_messages(stage):
        return False
    with suppress(*BROKEN), psycopg.connect(stage.database_url, autocommit=True, connect_timeout=2) as session:
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
    with suppress(*BROKEN):
        stage.rabbit.publish(stage.topology.queue, *bodies, properties=properties)
        return True
    return False


def _takes_messages(stage: Stage) -> bool:
    return not stage.outages.is_away(RABBITMQ) and not stage.outages.is_alarmed


def _pointer(email_id: str, message_key: str) -> bytes:
    return orjson.dumps({"v": 1, "email_id": email_id, "message_key": message_key})


def _bundle(emails: object) -> bytes:
    return orjson.dumps({"v": 2, "emails": emails})


def cut_network(*names: str) -> Deed:
    """The network of a host breaks: connections to these servers end, and new ones are refused, for a while."""
    return _away(names, Network.cut)


def black_hole(*names: str) -> Deed:
    """The network of a host is silent: connections to these servers stay, and nothing passes through them."""
    return _away(names, Network.black_hole)


def _away(names: Collection[str], part: Callable[[Network, Collection[str]], None]) -> Deed:
    def deed(stage: Stage, random: Random) -> bool:
        reachable = [host for host in stage.hosts if host.network is not None and not host.network.away]
        seconds = _short_or_long(stage, random)
        if not reachable:
            return False
        host = random.choice(reachable)
        network = host.network
        assert network is not None
        part(network, names)
        stage.later(seconds, network.heal)
        return True

    return deed


def hang_backend(stage: Stage, random: Random) -> bool:
    """SIGSTOP to a backend of PostgreSQL that serves one of our processes, and SIGCONT after a while."""
    return _hang_one(stage, random, "dispatcher relay", *_workers(stage))


def hang_backend_of_dead(stage: Stage, random: Random) -> bool:
    """SIGSTOP to a backend of a worker, SIGKILL to that worker, and SIGCONT to the backend after a while."""
    workers = _workers(stage)
    if not workers:
        return False
    worker = random.choice(list(workers))
    if not _hang_one(stage, random, worker):
        return False
    with suppress(ProcessLookupError):
        stage.diary.kill(workers[worker])
    return True


def _hang_one(stage: Stage, random: Random, *names: str) -> bool:
    statement = """
        select pid from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and application_name = any(%s)
        order by pid
    """
    seconds = _short_or_long(stage, random)
    if stage.outages.is_away(POSTGRES) or stage.has_hung:
        return False
    with suppress(ProcessLookupError, IndexError, psycopg.Error), _session(stage) as session:
        pids = [row[0] for row in session.execute(statement, [list(names)])]
        pid = random.choice(pids)
        stage.hang(pid, seconds)
        return True
    return False


def _workers(stage: Stage) -> dict[str, int]:
    """The workers of all hosts that have a ledger, and their pids."""
    return {worker: pid for host in stage.hosts for worker, pid in host.workers().items()}


def delete_ledger(stage: Stage, random: Random) -> bool:
    """The ledger of a living worker is gone; then its worker, soon, or when something else strikes it."""
    host = random.choice(stage.hosts)
    workers = host.workers()
    seconds = random.choice([0.0, random.uniform(0.0, 2.0), None])
    if not workers:
        return False
    worker = random.choice(sorted(workers))
    pid = workers[worker]
    stage.orphans.add(worker, pid, host.network)
    (host.run_dir / f"{worker}.ledger").unlink(missing_ok=True)

    def kill() -> None:
        with suppress(ProcessLookupError):
            stage.diary.kill(pid)

    if seconds is not None:
        stage.later(seconds, kill)
    return True


def step_clock(stage: Stage, random: Random) -> bool:
    """PostgreSQL's clock steps forward or back by more than a lease, and again to the true time after a while."""
    ahead = random.choice([-1, 1]) * random.uniform(stage.lease_seconds * 1.5, 30)
    seconds = random.uniform(1, 5)
    if stage.outages.is_away(POSTGRES) or not _set_clock(stage, ahead):
        return False
    stage.later(seconds, lambda: _set_clock(stage, 0))
    return True


def _set_clock(stage: Stage, ahead: float) -> bool:
    """Sets it; if PostgreSQL does not take it now, the true time is set later."""
    try:
        stage.clock.set(ahead)
    except psycopg.Error:
        if not ahead:
            stage.later(0.5, lambda: _set_clock(stage, 0))
        return False
    stage.diary.remark("clock", ahead=ahead)
    return True


def _session(stage: Stage) -> psycopg.Connection[tuple[Any, ...]]:
    return psycopg.connect(stage.database_url, autocommit=True, connect_timeout=2, options="-c statement_timeout=2000")


def provider(*, sendgrid: Mapping[str, object], smtp: Mapping[str, object]) -> Deed:
    """The provider behaves so for a while; see `dispatcher.dev.http_behaviour` and `smtp_script`."""
    behaviours = {"sendgrid": sendgrid, "smtp": smtp}

    def misbehave(stage: Stage, random: Random) -> bool:
        stage.behave(**behaviours[stage.provider_name])
        stage.later(random.uniform(0.5, 2.5), stage.behave)
        return True

    return misbehave


def _smtp(step: Step, text: str, **more: object) -> Mapping[str, object]:
    return {"script": {step.value: text}, **more}


DECK: Final[Mapping[str, tuple[Deed, int]]] = {
    "kill worker": (kill_worker, 7),
    "kill relay": (kill_relay, 6),
    "kill parent": (kill_parent, 4),
    "kill host": (kill_host, 2),
    "kill producer": (kill_producer, 4),
    "freeze worker": (freeze_worker, 2),
    "freeze relay": (freeze_relay, 1),
    "freeze host": (freeze_host, 1),
    "cut network": (cut_network(*SERVERS), 2),
    "cut network to database": (cut_network(POSTGRES), 1),
    "cut network to broker": (cut_network(RABBITMQ), 1),
    "black hole": (black_hole(*SERVERS), 2),
    "black hole to database": (black_hole(POSTGRES), 1),
    "black hole to broker": (black_hole(RABBITMQ), 1),
    "hang backend": (hang_backend, 2),
    "hang backend of dead": (hang_backend_of_dead, 1),
    "delete ledger": (delete_ledger, 2),
    "step clock": (step_clock, 3),
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
    "provider closes": (
        provider(sendgrid={"act": "close", "times": 3}, smtp=_smtp(Step.ANSWER, Act.CLOSE, times=3)),
        1,
    ),
    "provider resets": (
        provider(sendgrid={"act": "reset", "times": 3}, smtp=_smtp(Step.ANSWER, Act.RESET, times=3)),
        1,
    ),
    "provider forgets": (provider(sendgrid={"act": "forget", "times": 3}, smtp=_smtp(Step.END, Act.CLOSE, times=3)), 1),
    "provider breaks off": (
        provider(sendgrid={"act": "half-head", "times": 3}, smtp=_smtp(Step.ANSWER, "no reply", times=3)),
        1,
    ),
    "provider hangs": (provider(sendgrid={"act": "hang", "times": 2}, smtp=_smtp(Step.ANSWER, Act.HANG, times=2)), 1),
    "provider hangs up": (
        provider(sendgrid={"act": "last-answer", "times": 20}, smtp=_smtp(Step.MAIL, Act.CLOSE, times=20)),
        1,
    ),
    "provider 500": (
        provider(sendgrid={"reply": {"status": 500}, "times": 6}, smtp=_smtp(Step.END, "451 4.3.0 later", times=6)),
        1,
    ),
    "provider 503": (
        provider(sendgrid={"reply": {"status": 503}, "times": 30}, smtp=_smtp(Step.MAIL, "421 4.3.2 busy", times=30)),
        1,
    ),
    "provider 400": (
        provider(sendgrid={"reply": {"status": 400}, "times": 3}, smtp=_smtp(Step.END, "554 5.6.0 no", times=3)),
        1,
    ),
    "provider 429": (provider(sendgrid={"throttle_seconds": 1.0}, smtp=_smtp(Step.MAIL, "450 4.7.28 unusual rate")), 1),
    "provider is late": (provider(sendgrid={"latency_ms": 1000}, smtp={"latency_ms": 1000}), 1),
}
"""Every deed by its name, and how often it is in the deck that the adversary draws from."""

GENTLE: Final = ("provider", "step clock", "inject", "purge queue", "alarm broker", "add worker")
"""How the names of those begin that keep no worker from renewing its leases."""

KILLS: Final = ("kill worker", "kill relay", "kill parent", "kill host", "kill producer")
"""Those that are a SIGKILL to one of our processes."""
