"""One storm: enqueue and dispatch under load while the adversary does his worst, calm, rest, and the verdict.

with storm(plan, ground, folder) as …      everything real: processes, servers, sockets, signals
the adversary draws from a shuffled deck   the same seed draws the same cards in the same order
calm                                       what was frozen, cut or taken away is healed; producers are told the rest
rest                                       every email final, every dead letter published, the send queue empty
SIGTERM                                    exit 0, and no process left
verdict                                    by the oracle, from books that the product does not keep
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import psycopg

from dispatcher.broker.topology import Topology
from dispatcher.dev.oracle import Judgement, Records, explain_held, judge
from tests.acceptance.double import Double
from tests.acceptance.harness import Sink
from tests.acceptance.outages import POSTGRES, RABBITMQ, Removable
from tests.acceptance.rabbit import Rabbit
from tests.chaos.deed import BROKEN
from tests.chaos.deeds import DECK, GENTLE
from tests.chaos.diary import Diary
from tests.chaos.evidence import collect
from tests.chaos.harness import HarnessFailed
from tests.chaos.network import Network
from tests.chaos.outages import Outages
from tests.chaos.producers import Producers
from tests.chaos.stage import Provider, Stage
from tests.chaos.subject import COMMAND, Subject
from tests.store.steered_clock import SteeredClock
from tests.supervisor.program import Program, eventually

LOOK_SECONDS: Final = 0.05
DRAIN_SECONDS: Final = 5
START_SECONDS: Final = 90.0
STOP_SECONDS: Final = 30.0
CALM_SECONDS: Final = 180.0
"""For servers to come back, and for producers to be told the rest: RabbitMQ alone may take a minute to start on a busy
machine."""
MOST_FURTHER_RUNS: Final = 3

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a storm is to be.

    Attributes:
        seconds: How long the adversary works.
        rate: Emails per second.
        hosts: How many; the network of all but the first leads through proxies, unless the servers are a cluster.
        workers: Of each host.
        provider: `sendgrid` or `smtp`.
        latency_ms: The provider's.
        connections: How many requests a worker may have on the wire; what else it has leased waits.
        bundle: Most emails that a message on the send queue points to.
        pause_seconds: The shortest and the longest between two deeds.
        patience_seconds: So much longer the adversary waits where nothing was accepted since his last deed: on a busy
            machine, where processes take seconds to start, he would otherwise strike nobody at work.
        deck: How often each deed is in the deck; those that the ground does not allow are never drawn.
        command: What is tested instead of `dispatcher run`.
        rest_seconds: How long the way to rest may stand still after the storm.
    """

    seconds: float
    seed: int
    policy: str = "hold"
    rate: float = 100.0
    hosts: int = 2
    workers: int = 2
    provider: str = "sendgrid"
    pause_seconds: tuple[float, float] = (0.1, 1.2)
    patience_seconds: float = 3.0
    lease_seconds: float = 3.0
    latency_ms: int = 30
    connections: int = 12
    bundle: int = 1
    deck: Mapping[str, int] | None = None
    command: Sequence[str] = COMMAND
    rest_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Ground:
    """Servers that a storm may use.

    Attributes:
        removable: Names of those that it may take away.
        shares_broker: Whether somebody else uses the same RabbitMQ.
        outages: What takes them away, where that is not the deeds' to say.
    """

    removable: Removable
    removable_names: tuple[str, ...]
    database_url: str
    topology: Topology
    shares_broker: bool
    outages: Outages | None = None

    @property
    def urls(self) -> Mapping[str, str]:
        """Where a host finds each server."""
        return {POSTGRES: self.database_url, RABBITMQ: self.removable.servers.amqp_url}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A storm that is over.

    Attributes:
        deeds: How often the adversary did what.
        seconds: From the first process to the last.
    """

    verdict: Judgement
    books: Records
    deeds: Mapping[str, int]
    seconds: float


def play(plan: Plan, ground: Ground, folder: Path, tell: Tell) -> Outcome:
    """Plays a storm to its end; leaves no process behind.

    Raises:
        HarnessFailed: the storm cannot be judged.
        AssertionError: the dispatcher did not start.
    """
    began_at = time.monotonic()
    with _stage(plan, ground, folder) as stage:
        try:
            _rage(plan, stage, tell)
            _calm(plan, stage, tell)
            _rest(plan, stage, tell, stage.rabbit.waiting)
            _stop(stage)
            _finish_the_queue(plan, stage, tell)
            tell("counting")
            books = collect(stage, plan.policy)
        except HarnessFailed:
            raise
        except Exception as error:  # what the product does wrong is in the diary, and is no exception
            (folder / "harness.txt").write_text(traceback.format_exc())
            raise HarnessFailed(f"{type(error).__name__}: {error}") from error
    _write_held(folder / "held.jsonl", books)
    return Outcome(judge(books), books, stage.diary.deeds, time.monotonic() - began_at)


def _write_held(path: Path, books: Records) -> None:
    """Why each held email is held, with all that is known of it: what to read when one is not explained."""
    lines = (orjson.dumps(held, option=orjson.OPT_APPEND_NEWLINE) for held in explain_held(books))
    path.write_bytes(b"".join(lines))


@contextmanager
def _stage(plan: Plan, ground: Ground, folder: Path) -> Iterator[Stage]:
    diary = Diary(folder / "diary.jsonl")
    provider = _provider(plan, folder)
    hosts: list[Subject] = []
    producers = None
    try:
        clock = SteeredClock(ground.database_url)
        direct = {**ground.urls, POSTGRES: clock.url}
        env = _environment(plan, ground, folder, "init", direct, provider.settings)
        init = Program([*COMMAND[:-1], "init"], folder, "init", env=env)
        assert init.await_exit() == 0, init.words
        for number in range(plan.hosts):
            network = Network(direct) if number and ground.outages is None else None
            urls = network.urls if network else direct
            env = _environment(plan, ground, folder, f"host{number}", urls, provider.settings)
            hosts.append(Subject(folder, env, diary, plan.command, network))
        for host in hosts:
            host.program.await_events("broker.connected", plan.workers)
        producers = Producers(folder, clock.url, diary, rate=plan.rate, seconds=plan.seconds)
        servers = ground.removable.servers
        # A broker whose alarm is on reads nothing: our own messages must not wait for it.
        patience = "blocked_connection_timeout=5&socket_timeout=5&stack_timeout=5"
        patient = ",".join(f"{url}?{patience}" for url in servers.amqp_url.split(","))
        yield Stage(
            database_url=ground.database_url,
            topology=ground.topology,
            hosts=hosts,
            producers=producers,
            provider=provider,
            provider_name=plan.provider,
            rabbit=Rabbit(patient, servers.management_url),
            outages=ground.outages or Outages(ground.removable, ground.removable_names),
            clock=clock,
            diary=diary,
            lease_seconds=plan.lease_seconds,
            latency_ms=plan.latency_ms,
            shares_broker=ground.shares_broker,
        )
    finally:
        if producers is not None:
            producers.destroy()
        for host in hosts:
            host.destroy()
        provider.kill()


def _provider(plan: Plan, folder: Path) -> Provider:
    double = Sink if plan.provider == "smtp" else Double
    return double(folder / "double", "--wire")


def _environment(
    plan: Plan, ground: Ground, folder: Path, host: str, urls: Mapping[str, str], provider: Mapping[str, str]
) -> dict[str, str]:
    """Short leases and few connections, so that much is leased and not on the wire when it is struck."""
    servers, topology = ground.removable.servers, ground.topology
    settings = {
        "METRICS_ADDRESS": "off",
        "DATABASE_URL": urls[POSTGRES],
        "AMQP_URL": urls[RABBITMQ],
        "RABBITMQ_MANAGEMENT_URL": servers.management_url,
        "EXCHANGE": topology.exchange,
        "QUEUE": topology.queue,
        "DLQ": topology.dlq,
        "QUEUE_TYPE": topology.queue_type,
        "HOST_NAME": host,
        "RUN_DIR": folder / "run" / host,
        "WORKERS": plan.workers,
        "ON_UNCERTAIN": plan.policy,
        "LEASE_SECONDS": plan.lease_seconds,
        # Longer than a worker, or the double, may stand still for want of a core: nothing of ours would explain that.
        "SEND_TIMEOUT_SECONDS": 8,
        "DRAIN_SECONDS": DRAIN_SECONDS,
        "RETRY_BASE_SECONDS": 0.1,
        "RETRY_CAP_SECONDS": 1,
        # Used up attempts are held, whatever the policy says: under `resend` that would be a verdict on the harness.
        "MAX_ATTEMPTS": 5 if plan.policy == "hold" else 25,
        "PREFETCH": 64,
        "BUNDLE_EMAILS": plan.bundle,
        **{f"{kind}_CONNECTIONS": plan.connections for kind in ("HTTP", "SMTP")},
    }
    named = {f"DISPATCHER_{name}": str(value) for name, value in settings.items()}
    vendor = {name if name == "SENDGRID_API_KEY" else f"DISPATCHER_{name}": value for name, value in provider.items()}
    return {"PATH": os.defpath, **vendor, **named}


def _rage(plan: Plan, stage: Stage, tell: Tell) -> None:
    """The adversary's time."""
    # Apart from the cards: how often a deed throws its dice is the moment's, and must not change what is drawn next.
    chance = random.Random(f"the deeds of {plan.seed}")
    stage.behave()
    try:
        _await(stage, lambda: bool(stage.provider.delivered()), "the first email", 60)
    except AssertionError as error:
        stage.diary.blame(str(error))
        return
    ends_at = time.monotonic() + plan.seconds
    told_at = time.monotonic()
    for name in drawn(plan):
        deed, _ = DECK[name]
        if deed(stage, chance):
            stage.diary.note(name, strikes=not name.startswith(GENTLE))
        acts_at = time.monotonic() + chance.uniform(*plan.pause_seconds)
        accepted = stage.provider.ledger_octets
        while (now := time.monotonic()) < ends_at:
            is_standing = stage.provider.ledger_octets == accepted and now < acts_at + plan.patience_seconds
            if now >= acts_at and not is_standing:
                break
            stage.step()
            time.sleep(LOOK_SECONDS)
        if now - told_at >= 5:
            told_at = now
            tell(f"{ends_at - now:.0f} s left: {_seen(stage)}, {stage.diary.deeds.total()} deeds")
        if now >= ends_at:
            return


def drawn(plan: Plan) -> Iterator[str]:
    """Cards of a shuffled deck, and of the next one when it is used up, so that no deed is forgotten."""
    deck = plan.deck or {name: times for name, (_, times) in DECK.items()}
    shuffler = random.Random(plan.seed)
    cards = [name for name, times in deck.items() for _ in range(times)]
    while True:
        yield from shuffler.sample(cards, len(cards))


def _seen(stage: Stage) -> str:
    asked, accepted = len(stage.producers.asked()), stage.provider.delivered().total()
    return f"{asked} emails asked for, {accepted} accepted"


def _calm(plan: Plan, stage: Stage, tell: Tell) -> None:
    """Heals everything, and lets the producers hear what they still wait for."""
    tell(f"calm: {_seen(stage)}, {stage.diary.deeds.total()} deeds")
    stage.wake()
    stage.step(everything=True)
    stage.behave()
    stage.outages.heal()

    def away() -> str:
        return f"servers ({stage.outages.told or 'all are there'}) and producers ({stage.producers.told_of_ends})"

    def is_calm() -> bool:
        return stage.outages.is_over and stage.producers.are_done and not stage.calm

    try:
        _await(stage, is_calm, away, CALM_SECONDS)
    except AssertionError as error:
        raise HarnessFailed(str(error)) from error


def _rest(plan: Plan, stage: Stage, tell: Tell, queued: Callable[[str], int]) -> None:
    """Everything final, announced and gone from the queue; what stands still for too long is left to the oracle.

    Args:
        queued: How many messages the queue has.
    """
    fewest, moved_at = sys.maxsize, time.monotonic()
    while left := _unfinished(stage, queued):
        if left < fewest:
            fewest, moved_at = left, time.monotonic()
        elif time.monotonic() > moved_at + plan.rest_seconds:
            tell(f"not at rest: {fewest} emails and messages are left, and were for {plan.rest_seconds:g} s")
            stage.diary.remark("no rest", left=fewest)
            return
        stage.step()
        time.sleep(LOOK_SECONDS)


def _unfinished(stage: Stage, queued: Callable[[str], int]) -> int:
    """How many emails are not final and announced, and messages not taken; many, if a server that is just back refuses
    to say."""
    with suppress(*BROKEN), psycopg.connect(stage.database_url, autocommit=True) as session:
        row = session.execute(_OPEN).fetchone()
        assert row is not None
        return int(row[0]) + queued(stage.topology.queue)
    return sys.maxsize


def _finish_the_queue(plan: Plan, stage: Stage, tell: Tell) -> None:
    """Lets further runs take what the last one gave back as it stopped.

    A worker may have had messages at hand when all seemed at rest: second ones, of emails that are final. What stays
    after some runs is nobody's to take, and left for the oracle to see.
    """
    for _ in range(MOST_FURTHER_RUNS):
        if not (waiting := stage.rabbit.waiting(stage.topology.queue)):
            return
        tell(f"{waiting} messages were given back: once more")
        for host in stage.hosts:
            host.start()
        # Those at hand too: a message that points to fifty emails is not settled as soon as a worker has it.
        _rest(plan, stage, tell, stage.rabbit.unsettled)
        _stop(stage)


_OPEN: Final = """
    select count(*) from dispatcher.email_log
    where status not in ('sent', 'failed', 'held') or dead_letter_due_at is not null or publish_due_at is not null
"""


def _await(stage: Stage, condition: Callable[[], bool], what: str | Callable[[], str], seconds: float) -> None:
    def holds() -> bool:
        stage.step()
        time.sleep(LOOK_SECONDS)
        return condition()

    eventually(holds, what, seconds=seconds)


def _stop(stage: Stage) -> None:
    """SIGTERM: every run must exit 0, and every process must be gone."""
    try:
        # One of them may have been asked to end just before.
        _await(stage, lambda: all(host.is_up for host in stage.hosts), "the start of every host", START_SECONDS)
    except AssertionError as error:
        stage.diary.blame(str(error))
    for host in stage.hosts:
        host.ask_to_end()
    for host in stage.hosts:
        try:
            code = host.program.await_exit(STOP_SECONDS)
            if code != 0:
                stage.diary.blame(f"the last run of {host.name} ended with {code}")
            host.await_all_gone()
        except AssertionError as error:
            stage.diary.blame(str(error)[:300])
