"""The demo: a thousand emails through the whole chain, one worker killed half-way, and the books counted at the end.

    set the stage ─▶ init ─▶ run ─▶ poison the queue ─▶ enqueue, transaction by transaction ─▶ kill a worker ─▶
    wait until nothing is pending ─▶ stop the run ─▶ count: database, SMTP server's ledger, DLQ

Everything that sends is the product as an operator starts it, in processes of its own, set up by its environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings
from dispatcher.dev.demo_application import Application
from dispatcher.dev.demo_books import Books, Evidence, balance
from dispatcher.dev.demo_report import Report, count_rescued, count_retried, describe_kill
from dispatcher.dev.demo_stage import SMTP_LATENCY_MS, Stage, set_stage
from dispatcher.dev.ledger import read_ledger
from dispatcher.domain.status import FINISHED, Status
from dispatcher.errors import DispatcherError
from dispatcher.store.connections import Session, connected
from dispatcher.store.counts import count_emails
from dispatcher.store.queries import query

POISON: Final = b"\x00\xffNot a pointer to an email.\r\n"
LOOK_SECONDS: Final = 0.04
STALL_SECONDS: Final = 30.0
"""Longer than a lease, so that the slowest way out of a fault has had its time."""
SLOWEST_EMAILS_PER_SECOND: Final = 20


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for."""

    emails: int
    seed: int
    workers: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Scene:
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
        self._poison = 0
        self._killed_pid: int | None = None
        self._finished_at_kill = 0
        self._troubles: list[str] = []
        self._started_at = time.monotonic()
        self._look_at = 0.0
        self._moved_at = self._started_at
        self._scene = Scene(wishes.emails, 0, dict.fromkeys(Status, 0), 0.0)

    def play(self) -> Report:
        """The play behind the curtain."""
        self._publish_poison()
        self._started_at = self._moved_at = time.monotonic()
        for _ in self._application.work():
            self._look()
        application = self._application
        self._screen.say(
            f"enqueued {len(application.fates)} emails in {application.transactions} transactions, "
            f"{application.repeated} of them twice; rolled back {len(application.rolled_back)}"
        )
        while not self._is_settled() and not self._is_hopeless():
            time.sleep(LOOK_SECONDS)
            self._look()
        seconds = time.monotonic() - self._started_at
        self._stop()
        return self._report(seconds)

    def _publish_poison(self) -> None:
        """Puts a message at the head of the send queue that points to no email."""
        published = asyncio.run(_publish(self._stage.settings, POISON))
        if not published:
            raise DispatcherError("RabbitMQ did not take the poison message.")
        self._poison += 1

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
        if self._killed_pid is None and scene.finished >= (self._wishes.emails + 1) // 2:
            self._kill()

    def _kill(self) -> None:
        self._killed_pid = self._stage.kill_worker()
        self._finished_at_kill = self._scene.finished
        if self._killed_pid is not None:
            self._screen.say(f"killed worker process {self._killed_pid} (SIGKILL), {self._scene.finished} emails done")

    def _is_settled(self) -> bool:
        """Whether nothing is left to do: every email is finished, and every dead letter is on the DLQ."""
        if self._killed_pid is None or self._scene.finished < self._scene.enqueued:
            return False
        counts = self._scene.counts
        return self._dlq_depth() >= counts[Status.FAILED] + counts[Status.HELD] + self._poison

    def _is_hopeless(self) -> bool:
        """Whether waiting longer makes no sense; then notes why."""
        longest_seconds = STALL_SECONDS * 2 + self._wishes.emails / SLOWEST_EMAILS_PER_SECOND
        if self._stage.obituary() is not None:
            self._troubles.append(f"`dispatcher run` ended before it was told to; {self._stage.last_words()}")
        elif time.monotonic() - self._moved_at > STALL_SECONDS:
            self._troubles.append(f"nothing moved for {STALL_SECONDS:.0f} s; {self._stage.last_words()}")
        elif self._scene.seconds > longest_seconds:
            self._troubles.append(f"it took longer than {longest_seconds:.0f} s; {self._stage.last_words()}")
        return bool(self._troubles)

    def _stop(self) -> None:
        code = self._stage.stop_run()
        if code is None:
            self._troubles.append(f"`dispatcher run` did not end after SIGTERM; {self._stage.last_words()}")
        elif code != 0:
            self._troubles.append(f"`dispatcher run` ended with exit code {code} instead of 0")

    def _dlq_depth(self) -> int:
        settings = self._stage.settings
        return asyncio.run(depths(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file))[settings.dlq]

    def _report(self, seconds: float) -> Report:
        application, pid = self._application, self._killed_pid
        kill = None if pid is None else describe_kill(pid, self._finished_at_kill, self._stage.events())
        if kill is None:
            self._troubles.append("the relay's log does not say how the killed worker's emails were settled")
        if application.known != application.repeated:
            self._troubles.append(f"{application.repeated} emails were enqueued twice, {application.known} were known")
        return Report(
            books=self._books_or_troubles(),
            transactions=application.transactions,
            known=application.known,
            rolled_back=len(application.rolled_back),
            poison=self._poison,
            retried=count_retried(self._stage.events()),
            rescued=count_rescued(self._stage.events()),
            kill=kill,
            seconds=seconds,
            seed=self._wishes.seed,
            workers=self._wishes.workers,
            latency_ms=SMTP_LATENCY_MS,
            troubles=tuple(self._troubles),
            folder=self._stage.folder,
        )

    def _books_or_troubles(self) -> Books:
        """The books; where a server that is away keeps us from counting, the fault tells the other troubles too."""
        try:
            return self._books()
        except DispatcherError as error:
            raise DispatcherError("\n".join([*self._troubles, str(error)])) from error

    def _books(self) -> Books:
        application = self._application
        rows = self._connection.execute(query("list_statuses"))
        return balance(
            Evidence(
                fates=application.fates,
                rolled_back=application.rolled_back,
                standing={email_id: Status(status) for email_id, status in rows},
                counted=count_emails(self._connection).emails,
                times=read_ledger(self._stage.ledger).times,
                dlq=self._dlq_depth(),
                poison=self._poison,
            )
        )


async def _publish(settings: Settings, body: bytes) -> bool:
    """Puts bytes on the send queue as they are; returns whether they are there."""
    publisher = Publisher(settings.amqp_url, settings.exchange, name="dispatcher demo", ca_file=settings.ca_file)
    try:
        return (await publisher.publish([Outgoing(settings.queue, body, message_id="poison")]))[0]
    finally:
        await publisher.close()
