"""Runs one storm: enqueues and dispatches while an adversary causes faults, waits for all work, and gives a verdict."""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from dispatcher.dev.oracle import Judgement, Records, explain_held, judge
from tests.acceptance.harness import Double, Sink
from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.acceptance.rabbit import Rabbit
from tests.chaos.actions import DECK, EVENT_CARDS, GENTLE
from tests.chaos.diary import Diary
from tests.chaos.evidence import collect
from tests.chaos.outages import Outages
from tests.chaos.plan import Ground, HarnessFailed, StormPlan
from tests.chaos.reporter import EventSource, Reporter
from tests.chaos.stage import BROKEN, Producers, StormStage, rows_of
from tests.chaos.subject import COMMAND, Network, Subject
from tests.store.steered_clock import SteeredClock
from tests.supervisor.program import Program, eventually

LOOK_SECONDS: Final = 0.05
DRAIN_SECONDS: Final = 5
START_SECONDS: Final = 90.0
STOP_SECONDS: Final = 30.0
CALM_SECONDS: Final = 180.0
"""The time limit for servers to restart, and for the producers' remaining calls to get answers. RabbitMQ alone may take
a minute on a busy machine."""
MAX_FURTHER_RUNS: Final = 3

CHOSEN: Final = frozenset({
    *("DATABASE_URL", "AMQP_URL", "RABBITMQ_MANAGEMENT_URL", "EXCHANGE", "QUEUE", "DLQ", "HOST_NAME", "RUN_DIR"),
    *("WORKERS", "ON_UNCERTAIN", "LEASE_SECONDS", "BUNDLE_EMAILS", "PROVIDERS", "SMS_PROVIDERS"),
    *("SENDGRID_HOST", "SMTP_URL", "TWILIO_URL"),
})  # fmt: skip
"""The settings that `StormPlan.settings` must not replace, because the harness relies on its own values."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StormOutcome:
    verdict: Judgement
    books: Records
    actions: Mapping[str, int]
    seconds: float


def play(plan: StormPlan, ground: Ground, folder: Path, tell: Tell) -> StormOutcome:
    """Run a storm to its end. No process is left running. Raises AssertionError if the dispatcher did not start."""
    began_at = time.monotonic()
    with _stage(plan, ground, folder) as stage:
        try:
            _rage(plan, stage, tell)
            _calm(plan, stage, tell)
            _rest(plan, stage, tell, stage.rabbit.waiting)
            if stage.reporter is not None:
                tell("reporting the remaining events")
                stage.reporter.observe(stage.provider.delivered(), stage.sms())
                stage.reporter.finish()
                tell(f"forged requests: {stage.reporter.refused_forgeries} refused")
                _rest(plan, stage, tell, stage.rabbit.waiting)
            _stop(stage)
            _finish_the_queue(plan, stage, tell)
            tell("counting")
            books = collect(stage, plan.policy)
        except HarnessFailed:
            raise
        except Exception as error:  # errors of the product are recorded in the diary and raise no exception
            (folder / "harness.txt").write_text(traceback.format_exc())
            raise HarnessFailed(f"{type(error).__name__}: {error}") from error
    # Unexplained held emails can be examined by this file.
    lines = (orjson.dumps(held, option=orjson.OPT_APPEND_NEWLINE) for held in explain_held(books))
    (folder / "held.jsonl").write_bytes(b"".join(lines))
    return StormOutcome(judge(books), books, stage.diary.actions, time.monotonic() - began_at)


@contextmanager
def _stage(plan: StormPlan, ground: Ground, folder: Path) -> Iterator[StormStage]:
    diary = Diary(folder / "diary.jsonl")
    provider = _provider(plan, folder)
    hosts: list[Subject] = []
    producers = reporter = None
    try:
        clock = SteeredClock(ground.database_url)
        direct = {**ground.urls, POSTGRES: clock.url}
        env = _environment(plan, ground, folder, "init", direct, _provider_settings(plan, provider))
        _run_command(folder, env, "init")
        for domain, options in plan.ceilings.items():
            _run_command(folder, env, "domains", "set", domain, *options)
        for number in range(plan.hosts):
            network = Network(direct) if number and ground.outages is None else None
            urls = network.urls if network else direct
            env = _environment(plan, ground, folder, f"host{number}", urls, _provider_settings(plan, provider))
            hosts.append(Subject(folder, env, diary, plan.command, network))
        for host in hosts:
            host.program.await_events("broker.connected", plan.workers)
        producers = Producers(folder, clock.url, plan)
        if plan.events:
            env = _environment(plan, ground, folder, "api", direct, _provider_settings(plan, provider))
            reporter = Reporter(EventSource(folder, env, diary, ground.database_url), plan.provider, plan.seed)
        servers = ground.stoppable.servers
        # During a memory alarm, RabbitMQ does not read from publishers. The storm's own publishing must not wait for
        # the end of the alarm.
        patience = "blocked_connection_timeout=5&socket_timeout=5&stack_timeout=5"
        patient = ",".join(f"{url}?{patience}" for url in servers.amqp_url.split(","))
        yield StormStage(
            plan=plan,
            ground=ground,
            hosts=hosts,
            producers=producers,
            provider=provider,
            rabbit=Rabbit(patient, servers.management_url),
            outages=ground.outages or Outages(ground.stoppable, ground.removable_names),
            clock=clock,
            diary=diary,
            reporter=reporter,
        )
    finally:
        if reporter is not None:
            reporter.stop()
        if producers is not None:
            producers.destroy()
        for host in hosts:
            host.destroy()
        provider.kill()


def _run_command(folder: Path, env: Mapping[str, str], *words: str) -> None:
    program = Program([*COMMAND[:-1], *words], folder, "-".join(words[:3]), env=env)
    assert program.await_exit() == 0, program.words


def _provider(plan: StormPlan, folder: Path) -> Double | Sink:
    if plan.provider != "smtp":
        return Double(folder / "double", "--wire")
    return Sink(folder / "double", "--wire", "--recipients-per-transaction", str(plan.recipients_per_transaction))


def _provider_settings(plan: StormPlan, provider: Double | Sink) -> dict[str, str]:
    settings = {} if plan.channel == "sms" else dict(provider.settings)
    if plan.channel != "email":
        assert isinstance(provider, Double), "the SMTP double takes no SMS"
        settings |= provider.sms_settings
    return settings


def _environment(
    plan: StormPlan, ground: Ground, folder: Path, host: str, urls: Mapping[str, str], provider: Mapping[str, str]
) -> dict[str, str]:
    """The settings of a host. Leases are short and connections few, so many emails are leased but not on the wire when
    a process is killed."""
    servers, topology = ground.stoppable.servers, ground.topology
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
        # This is longer than a worker or the double may wait for a CPU core. Otherwise sends would time out without a
        # fault that explains it.
        "SEND_TIMEOUT_SECONDS": 8,
        "DRAIN_SECONDS": DRAIN_SECONDS,
        "RETRY_BASE_SECONDS": 0.1,
        "RETRY_CAP_SECONDS": 1,
        # With either policy, an uncertain email that has used up its attempts is held. With `resend`, the oracle would
        # then report a violation that the harness caused.
        "MAX_ATTEMPTS": 5 if plan.policy == "hold" else 25,
        "PREFETCH": 64,
        "BUNDLE_EMAILS": plan.bundle,
        **{f"{kind}_CONNECTIONS": plan.connections for kind in ("HTTP", "SMTP")},
    }
    named = {f"DISPATCHER_{name}": str(value) for name, value in settings.items()}
    vendor = {name if name == "SENDGRID_API_KEY" else f"DISPATCHER_{name}": value for name, value in provider.items()}
    return {"PATH": os.defpath, **vendor, **named, **plan.settings}


def _rage(plan: StormPlan, stage: StormStage, tell: Tell) -> None:
    # The actions draw from a separate generator. How many numbers an action draws depends on timing, and must not
    # change the next cards.
    chance = random.Random(f"the actions of {plan.seed}")
    stage.behave()
    try:
        _await(stage, lambda: bool(stage.provider.delivered()), "the first email", 60)
    except AssertionError as error:
        stage.diary.note_fault(str(error))
        return
    ends_at = time.monotonic() + plan.seconds
    printed_at = time.monotonic()
    for name in drawn(plan):
        action, _ = DECK[name]
        if action(stage, chance):
            stage.diary.note(name, strikes=not name.startswith(GENTLE))
        acts_at = time.monotonic() + chance.uniform(*plan.pause_seconds)
        accepted = stage.provider.ledger_octets
        while (now := time.monotonic()) < ends_at:
            is_stalled = stage.provider.ledger_octets == accepted and now < acts_at + plan.patience_seconds
            if now >= acts_at and not is_stalled:
                break
            stage.step()
            time.sleep(LOOK_SECONDS)
        if now - printed_at >= 5:
            printed_at = now
            tell(f"{ends_at - now:.0f} s left: {_seen(stage)}, {stage.diary.actions.total()} actions")
        if now >= ends_at:
            return


def drawn(plan: StormPlan) -> Iterator[str]:
    """Yield the cards of a shuffled deck, then of a new shuffled deck, and so on, so that every action is drawn."""
    usual = {name: times for name, (_, times) in DECK.items()}
    deck = plan.deck or {**usual, **(EVENT_CARDS if plan.events else {})}
    shuffler = random.Random(plan.seed)
    cards = [name for name, times in deck.items() for _ in range(times)]
    while True:
        yield from shuffler.sample(cards, len(cards))


def _seen(stage: StormStage) -> str:
    enqueued, accepted = len(stage.producers.keys()), stage.provider.delivered().total()
    return f"{enqueued} emails enqueued, {accepted} accepted"


def _calm(plan: StormPlan, stage: StormStage, tell: Tell) -> None:
    tell(f"calm: {_seen(stage)}, {stage.diary.actions.total()} actions")
    stage.wake()
    stage.step(everything=True)
    stage.behave()
    stage.outages.heal()

    def is_calm() -> bool:
        return stage.outages.is_over and stage.producers.are_done and not stage.calm

    try:
        _await(stage, is_calm, "the servers' restart and the producers' last answers", CALM_SECONDS)
    except AssertionError as error:
        raise HarnessFailed(str(error)) from error


def _rest(plan: StormPlan, stage: StormStage, tell: Tell, queued: Callable[[str], int]) -> None:
    """Wait until every email is in a final status, every dead letter is published, and the queue is empty. If there is
    no progress, and no email waits for its time, stop waiting; the oracle then judges. `queued` counts the messages of
    the queue."""
    fewest, moved_at = sys.maxsize, time.monotonic()
    while left := _unfinished(stage, queued):
        if left < fewest or _some_wait(stage):
            fewest, moved_at = min(fewest, left), time.monotonic()
        elif time.monotonic() > moved_at + plan.rest_seconds:
            tell(f"not at rest: {fewest} emails and messages are left, unchanged for {plan.rest_seconds:g} s")
            stage.diary.note_event("no rest", left=fewest)
            return
        stage.step()
        time.sleep(LOOK_SECONDS)


def _unfinished(stage: StormStage, queued: Callable[[str], int]) -> int:
    """The number of emails that are in no final status or have an unpublished dead letter, plus messages on the queue.
    Returns a large number if a restarting server does not answer."""
    with suppress(*BROKEN, ValueError):
        ((emails,),) = rows_of(stage, _OPEN)
        return int(emails) + queued(stage.ground.topology.queue)
    return sys.maxsize


def _some_wait(stage: StormStage) -> bool:
    return bool(rows_of(stage, _WAITING))


def _finish_the_queue(plan: StormPlan, stage: StormStage, tell: Tell) -> None:
    """Let further runs process the messages that the previous run returned to the queue when it stopped: a worker may
    have had unacked messages, such as second messages of finished emails."""
    for _ in range(MAX_FURTHER_RUNS):
        if not (waiting := stage.rabbit.waiting(stage.ground.topology.queue)):
            return
        tell(f"{waiting} messages were returned; starting another run")
        for host in stage.hosts:
            host.start()
        # This count includes unacked messages, because a worker needs some time for a message that points to fifty
        # emails.
        _rest(plan, stage, tell, stage.rabbit.unsettled)
        _stop(stage)


_OPEN: Final = """
    select count(*) from dispatcher.email_log
    where tenant_id <> 'damaged'
        and (
            status not in ('sent', 'failed', 'held', 'cancelled')
            or dead_letter_due_at is not null
            or publish_due_at is not null
            or (proven_by is not null and status <> 'sent')
        )
"""
_WAITING: Final = """
    select from dispatcher.email_log
    where status = 'waiting' and wait_until > clock_timestamp() and tenant_id <> 'damaged'
    limit 1
"""


def _await(stage: StormStage, condition: Callable[[], bool], what: str, seconds: float) -> None:
    def holds() -> bool:
        stage.step()
        time.sleep(LOOK_SECONDS)
        return condition()

    eventually(holds, what, seconds=seconds)


def _stop(stage: StormStage) -> None:
    try:
        # An action may just have stopped a run. Its successor must start first.
        _await(stage, lambda: all(host.is_up for host in stage.hosts), "the start of every host", START_SECONDS)
    except AssertionError as error:
        stage.diary.note_fault(str(error))
    for host in stage.hosts:
        host.begin_stop()
    for host in stage.hosts:
        try:
            code = host.program.await_exit(STOP_SECONDS)
            if code != 0:
                stage.diary.note_fault(f"the last run of {host.name} ended with {code}")
            host.await_all_ended()
        except AssertionError as error:
            stage.diary.note_fault(str(error)[:300])
