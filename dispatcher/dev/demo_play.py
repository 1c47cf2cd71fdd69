"""The demo: a thousand emails through the whole chain, one worker killed half-way, and the oracle's verdict at the end.

    set the stage ─▶ init ─▶ run ─▶ poison the queue ─▶ enqueue, transaction by transaction ─▶ kill a worker ─▶
    wait until nothing is pending ─▶ stop the run ─▶ judge: database, SMTP server's ledger and wire, DLQ

Everything that sends is the product as an operator starts it, in processes of its own, set up by its environment.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from dispatcher.broker.connection import open_connection
from dispatcher.broker.dead_letter import decode
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.dev.acceptance_ledger import read_ledger
from dispatcher.dev.demo_emails import ROLLED_BACK_EMAILS, Application, Fate
from dispatcher.dev.demo_stage import SMTP_LATENCY_MS, Stage, read_events, set_stage
from dispatcher.dev.oracle import Books, Letter, Row, judge
from dispatcher.dev.wire import Attempt, Disturbance, Wire
from dispatcher.domain.status import FINISHED, Status
from dispatcher.errors import DispatcherError, InvalidPointer
from dispatcher.store.connections import Session, connected
from dispatcher.store.counts import count_emails
from dispatcher.store.queries import query

POISON: Final = b"\x00\xffNot a pointer to an email.\r\n"
LOOK_SECONDS: Final = 0.04
STALL_SECONDS: Final = 30.0
"""Longer than a lease, so that the slowest way out of a fault has had its time."""
SLOWEST_EMAILS_PER_SECOND: Final = 20
_NAMED: Final = 3


class Wishes(NamedTuple):
    """What was asked for."""

    emails: int
    seed: int
    workers: int
    folder: Path


class Scene(NamedTuple):
    """How far it is.

    Attributes:
        emails: How many there will be.
        enqueued: How many there are.
        counts: Those, by status.
    """

    emails: int
    enqueued: int
    counts: Mapping[Status, int]
    seconds: float

    @property
    def finished(self) -> int:
        """How many no machine does anything about any more."""
        return sum(self.counts[status] for status in FINISHED)


class Screen(Protocol):
    """Who is shown what happens."""

    def say(self, words: str) -> None:
        """One line; may come from another thread."""

    def show(self, scene: Scene) -> None:
        """How far it is; comes often."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The worker that was killed, and how its emails were settled, as the relay's log has it.

    Attributes:
        worker: Its slot, such as `w0`.
        finished: How many emails were finished by then.
        released: Leases that were given back at once: nothing had left.
        recorded: Answers that had arrived and were not in the database yet; its in-flight ledger had them.
        uncertain: On the wire at that moment, without an answer.
    """

    worker: str
    finished: int
    released: int
    recorded: int
    uncertain: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a demo came to.

    Attributes:
        pending: Not finished: pending or sending.
        delivered: Different emails in the server's ledger.
        held_delivered: How many of those are held.
        duplicates: Acceptances beyond each email's first.
        lost: Emails without a row, without an end, or `sent` and not in the ledger.
        dlq: Messages on the DLQ.
        known: Answers to a second enqueue that named the first one's email.
        rolled_back: Emails whose transaction was rolled back.
        poison: Messages put on the send queue that point to no email.
        retried: Emails that the server deferred at least once.
        recovered: Emails that came back only when their lease had run out; the in-flight ledger makes it none.
        killed: None if no worker was killed.
        seconds: From the first enqueue until nothing was pending any more.
        smtp_latency_ms: How long the SMTP server took to answer.
        folder: Where the logs, the mail and the ledger are.
        differences: Everything that is not as promised, in words.
    """

    emails: int
    sent: int
    failed: int
    held: int
    pending: int
    delivered: int
    held_delivered: int
    duplicates: int
    lost: int
    dlq: int
    transactions: int
    known: int
    rolled_back: int
    poison: int
    retried: int
    recovered: int
    killed: Kill | None
    seconds: float
    seed: int
    workers: int
    smtp_latency_ms: int
    folder: Path
    differences: tuple[str, ...]

    @property
    def balances(self) -> bool:
        """Whether everything is as promised."""
        return not self.differences

    @property
    def emails_per_second(self) -> float:
        """Emails over seconds: the kill, the retries and the server's latency included."""
        return self.emails / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The form that scripts rely on."""
        rounded = {"seconds": round(self.seconds, 2), "emails_per_second": round(self.emails_per_second, 1)}
        return {**asdict(self), **rounded, "folder": str(self.folder), "balances": self.balances}


def play(wishes: Wishes, screen: Screen) -> Report:
    """Plays the demo; no process is left when it returns or raises.

    Raises:
        DispatcherError: it could not be played.
    """
    with set_stage(wishes.folder, workers=wishes.workers, progress=screen.say) as stage:
        for change in stage.initialise():
            screen.say(f"dispatcher init: {change}")
        stage.start_run()
        screen.say(f"dispatcher run: {wishes.workers} workers and the relay are ready")
        with connected(stage.settings.database_url, name="dispatcher demo") as connection:
            return _Performance(wishes, stage, connection, screen).play()


class _Performance:
    """One run of the play, from the first enqueue to the report."""

    def __init__(self, wishes: Wishes, stage: Stage, connection: Session, screen: Screen) -> None:
        self._wishes = wishes
        self._stage = stage
        self._connection = connection
        self._screen = screen
        self._application = Application(connection, wishes.emails, wishes.seed)
        self._kill: Disturbance | None = None
        self._finished_at_kill = 0
        self._troubles: list[str] = []
        self._started_at = time.monotonic()
        self._look_at = 0.0
        self._moved_at = self._started_at
        self._scene = Scene(wishes.emails, 0, dict.fromkeys(Status, 0), 0.0)

    def play(self) -> Report:
        """The play behind the curtain."""
        if not asyncio.run(_publish(self._stage.settings, POISON)):
            raise DispatcherError("RabbitMQ did not take the poison message.")
        self._started_at = self._moved_at = time.monotonic()
        application = self._application
        for _ in application.work():
            self._look()
        self._screen.say(
            f"enqueued {len(application.fates)} emails in {application.transactions} transactions, "
            f"{application.repeated} of them twice; rolled back {ROLLED_BACK_EMAILS}"
        )
        while not self._is_settled() and not self._is_hopeless():
            time.sleep(LOOK_SECONDS)
            self._look()
        seconds = time.monotonic() - self._started_at
        code = self._stage.stop_run()
        if code is None:
            self._troubles.append(f"`dispatcher run` did not end after SIGTERM; {self._stage.last_words()}")
        elif code != 0:
            self._troubles.append(f"`dispatcher run` ended with exit code {code} instead of 0")
        try:
            return self._report(seconds)
        except DispatcherError as error:  # a server is away; the fault tells the other troubles, too
            raise DispatcherError("\n".join([*self._troubles, str(error)])) from error

    def _look(self) -> None:
        """Counts, shows, and kills a worker once half of the emails are finished."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        counts = count_emails(self._connection).emails
        scene = Scene(self._wishes.emails, len(self._application.fates), counts, now - self._started_at)
        if counts != self._scene.counts:
            self._moved_at = now
        self._scene = scene
        self._screen.show(scene)
        if self._kill is None and scene.finished >= (self._wishes.emails + 1) // 2:
            killed_at, pid = time.time(), self._stage.kill_worker()
            if pid is not None:
                self._kill, self._finished_at_kill = Disturbance(pid, killed_at), scene.finished
                self._screen.say(f"killed worker process {pid} (SIGKILL), {scene.finished} emails done")

    def _is_settled(self) -> bool:
        """Whether nothing is left to do: every email is finished, and every dead letter is on the DLQ."""
        if self._kill is None or self._scene.finished < self._scene.enqueued:
            return False
        counts = self._scene.counts
        return len(asyncio.run(_read_dlq(self._stage.settings))) >= counts[Status.FAILED] + counts[Status.HELD] + 1

    def _is_hopeless(self) -> bool:
        """Whether waiting longer makes no sense; then notes why."""
        longest_seconds = STALL_SECONDS * 2 + self._wishes.emails / SLOWEST_EMAILS_PER_SECOND
        if self._stage.obituary() is not None:
            why = "`dispatcher run` ended before it was told to"
        elif time.monotonic() - self._moved_at > STALL_SECONDS:
            why = f"nothing moved for {STALL_SECONDS:.0f} s"
        elif self._scene.seconds > longest_seconds:
            why = f"it took longer than {longest_seconds:.0f} s"
        else:
            return False
        self._troubles.append(f"{why}; {self._stage.last_words()}")
        return True

    def _report(self, seconds: float) -> Report:
        application, events = self._application, self._stage.events()
        killed = self._killed(events)
        known = sum(answer.acceptance == "known" for answer in application.told)
        if killed is None:
            self._troubles.append("the relay's log does not say how the killed worker's emails were settled")
        if known != application.repeated:
            self._troubles.append(f"{application.repeated} emails were enqueued twice, {known} were known")
        dlq = asyncio.run(_read_dlq(self._stage.settings))
        books = self._books(dlq)
        verdict = judge(books)
        statuses = Counter(row.status for row in books.rows.values())
        wrong = [
            f"{name}: {len(found)}, such as {', '.join(found[:_NAMED])}" for name, found in verdict.violations.items()
        ]
        return Report(
            emails=len(application.fates),
            sent=statuses[Status.SENT],
            failed=statuses[Status.FAILED],
            held=statuses[Status.HELD],
            pending=statuses[Status.PENDING] + statuses[Status.SENDING],
            delivered=len(books.accepted),
            held_delivered=sum(row.status == Status.HELD and i in books.accepted for i, row in books.rows.items()),
            duplicates=verdict.duplicates,
            lost=verdict.lost,
            dlq=len(dlq),
            transactions=application.transactions,
            known=known,
            rolled_back=ROLLED_BACK_EMAILS,
            poison=1,
            retried=len({each["email_id"] for each in events if each.get("outcome") == "deferred"}),
            recovered=sum(event["event"] == "email.recovered" for event in events),
            killed=killed,
            seconds=seconds,
            seed=self._wishes.seed,
            workers=self._wishes.workers,
            smtp_latency_ms=SMTP_LATENCY_MS,
            folder=self._stage.folder,
            differences=(*wrong, *self._troubles),
        )

    def _books(self, dlq: Sequence[bytes]) -> Books:
        rows = {row[0]: Row(*row[1:]) for row in self._connection.execute(query("list_demo_rows"))}
        counted, found = count_emails(self._connection).emails, Counter(row.status for row in rows.values())
        letters = [letter for body in dlq if (letter := _letter(body))]
        times = read_ledger(self._stage.ledger).times
        return Books(
            asked=frozenset(self._application.fates),
            refused=frozenset(key for key, fate in self._application.fates.items() if fate is Fate.REFUSED),
            told=self._application.told,
            rows=rows,
            attempts=[Attempt(*row) for row in self._connection.execute(query("list_demo_attempts"))],
            letters=letters,
            refuse=[body for body in dlq if not _letter(body)],
            garbage=frozenset({POISON}),
            accepted={UUID(email_id): count for email_id, count in times.items() if email_id},
            wire=Wire.of(read_events(self._stage.wire)),
            disturbances=[self._kill] if self._kill else [],
            faults=[
                f"`dispatcher status` counts {count} {status}; the rows say {found[status]}"
                for status, count in counted.items()
                if count != found[status]
            ],
        )

    def _killed(self, events: Sequence[Mapping[str, Any]]) -> Kill | None:
        """How the killed worker's emails were settled, by the run's log; None if the log has nothing of it."""
        for event in events:
            if event["event"] == "ledger.settled" and self._kill:
                _, slot, pid, _ = event["worker"].split(":")  # host, slot, pid, random
                if pid == str(self._kill.pid):
                    counts = (event["released"], event["recorded"], event["uncertain"])
                    return Kill(slot, self._finished_at_kill, *counts)
        return None


def _letter(body: bytes) -> Letter | None:
    """The dead letter that a message is; None for any other."""
    try:
        found = decode(body)
    except InvalidPointer:
        return None
    return Letter(found.email_id, found.status)


async def _read_dlq(settings: Settings) -> list[bytes]:
    """What is on the DLQ; it stays there."""
    async with (
        await open_connection(settings.amqp_url, name="dispatcher demo", ca_file=settings.ca_file) as connection,
        DeadLetterQueue(connection, settings.dlq).look() as look,
    ):
        return [found.body async for batch in look.batches() for found in batch]


async def _publish(settings: Settings, body: bytes) -> bool:
    """Puts bytes on the send queue as they are; returns whether they are there."""
    publisher = Publisher(settings.amqp_url, settings.exchange, name="dispatcher demo", ca_file=settings.ca_file)
    try:
        return (await publisher.publish([Outgoing(settings.queue, body, message_id="poison")]))[0]
    finally:
        await publisher.close()
