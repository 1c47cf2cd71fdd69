"""The demo: sends a thousand emails through the whole system, kills a worker, and checks the result with `oracle`.

    start servers ─▶ init ─▶ run ─▶ publish a poison message ─▶ enqueue in transactions ─▶ kill a worker ─▶
    wait until nothing is pending ─▶ stop the run ─▶ check the database, the SMTP server's records and the DLQ

A real `dispatcher run` sends the emails, in its own processes. Environment variables configure it.
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
from dispatcher.dev.demo_emails import ROLLED_BACK_EMAILS, Application, ExpectedOutcome
from dispatcher.dev.demo_host import SMTP_LATENCY_MS, DemoHost, open_demo_host, read_events
from dispatcher.dev.oracle import DlqEntry, Records, Row, judge
from dispatcher.dev.wire import Disturbance, RecordedAttempt, Wire
from dispatcher.domain.status import FINISHED, Status
from dispatcher.errors import DispatcherError, InvalidPointer
from dispatcher.store.connections import Session, connected
from dispatcher.store.figures import count_emails
from dispatcher.store.queries import query

POISON: Final = b"\x00\xffNot a pointer to an email.\r\n"
CHECK_SECONDS: Final = 0.04
STALL_SECONDS: Final = 30.0
"""The demo gives up if no email changes its status for this long. This is longer than a lease in the demo, because a
recovery sometimes has to wait until a lease expires."""
SLOWEST_EMAILS_PER_SECOND: Final = 20
_EXAMPLES_SHOWN: Final = 3


class DemoOptions(NamedTuple):
    """The options of `dispatcher demo`."""

    emails: int
    seed: int
    workers: int
    folder: Path


class DemoProgress(NamedTuple):
    """The demo's progress: `emails` are planned, `counts` has those enqueued by status, `seconds` counts from the first
    enqueue."""

    emails: int
    enqueued: int
    counts: Mapping[Status, int]
    seconds: float

    @property
    def finished(self) -> int:
        return sum(self.counts[status] for status in FINISHED)


class ProgressDisplay(Protocol):
    """Shows the demo's progress to the user."""

    def say(self, text: str) -> None:
        """Prints one line. Other threads may call this, too."""

    def show(self, progress: DemoProgress) -> None:
        """Replaces the displayed progress. Called many times a second."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The worker that the demo killed after `finished` emails, and what the relay did with its leases: `released` (not
    on the wire), `recorded` (answered, from the ledger), or `uncertain` (on the wire without an answer)."""

    worker: str
    finished: int
    released: int
    recorded: int
    uncertain: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a demo.

    Attributes:
        pending: Emails with the status `pending` or `sending`.
        duplicates: Acceptances of emails that the SMTP server had already accepted.
        lost: Emails without a row, emails in no final status, and `sent` emails that the SMTP server did not accept.
        dlq: Messages on the DLQ, including the poison message.
        known: Repeated enqueues that returned the id of the first enqueue's email.
        retried: Emails that the server deferred at least once.
        recovered: Emails that the relay recovered only after their lease had expired; 0 if the in-flight ledger works.
        seconds: The time from the first enqueue until no email was pending.
        differences: A description of each violation of the promise, and of each fault of the run.
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
        return not self.differences

    @property
    def emails_per_second(self) -> float:
        """The average rate of the whole demo. The kill, the retries and the server's latency reduce this rate."""
        return self.emails / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The output of `--json`. Scripts rely on these fields."""
        rounded = {"seconds": round(self.seconds, 2), "emails_per_second": round(self.emails_per_second, 1)}
        return {**asdict(self), **rounded, "folder": str(self.folder), "balances": self.balances}


def run_demo(options: DemoOptions, display: ProgressDisplay) -> Report:
    """Runs the demo. No process of the demo is left when this returns or raises."""
    with open_demo_host(options.folder, workers=options.workers, progress=display.say) as host:
        for change in host.initialise():
            display.say(f"dispatcher init: {change}")
        host.start_run()
        workers = f"{options.workers} worker{'' if options.workers == 1 else 's'}"
        display.say(f"dispatcher run: {workers} and the relay are ready")
        with connected(host.settings.database_url, name="dispatcher demo") as connection:
            return _DemoRun(options, host, connection, display).run()


class _DemoRun:
    """One demo, from the first enqueue to the report."""

    def __init__(self, options: DemoOptions, host: DemoHost, connection: Session, display: ProgressDisplay) -> None:
        self._options = options
        self._host = host
        self._connection = connection
        self._display = display
        self._application = Application(connection, options.emails, options.seed)
        self._kill: Disturbance | None = None
        self._finished_at_kill = 0
        self._faults: list[str] = []
        self._started_at = time.monotonic()
        self._next_check_at = 0.0
        self._changed_at = self._started_at
        self._progress = DemoProgress(options.emails, 0, dict.fromkeys(Status, 0), 0.0)

    def run(self) -> Report:
        """Publishes a poison message, enqueues the emails and kills a worker. Returns the report at the end."""
        if not asyncio.run(_publish(self._host.settings, POISON)):
            raise DispatcherError("RabbitMQ did not confirm the poison message.")
        self._started_at = self._changed_at = time.monotonic()
        application = self._application
        for _ in application.work():
            self._check_progress()
        self._display.say(
            f"enqueued {len(application.expected_outcomes)} emails in {application.transactions} transactions, "
            f"{application.repeated} of them twice; rolled back {ROLLED_BACK_EMAILS}"
        )
        while not self._is_done() and not self._is_stalled():
            time.sleep(CHECK_SECONDS)
            self._check_progress()
        seconds = time.monotonic() - self._started_at
        code = self._host.stop_run()
        if code is None:
            self._faults.append(f"`dispatcher run` did not exit after SIGTERM; {self._host.log_tail()}")
        elif code != 0:
            self._faults.append(f"`dispatcher run` exited with code {code} instead of 0")
        try:
            return self._report(seconds)
        except DispatcherError as error:
            # A server is unreachable. The new error also contains the faults that the demo found before.
            raise DispatcherError("\n".join([*self._faults, str(error)])) from error

    def _check_progress(self) -> None:
        """Counts the emails, updates the display, and kills a worker when half of the emails are finished."""
        now = time.monotonic()
        if now < self._next_check_at:
            return
        self._next_check_at = now + CHECK_SECONDS
        counts = count_emails.sync(self._connection)
        enqueued = len(self._application.expected_outcomes)
        progress = DemoProgress(self._options.emails, enqueued, counts, now - self._started_at)
        if counts != self._progress.counts:
            self._changed_at = now
        self._progress = progress
        self._display.show(progress)
        if self._kill is None and progress.finished >= (self._options.emails + 1) // 2:
            killed_at, pid = time.time(), self._host.kill_worker()
            if pid is not None:
                self._kill, self._finished_at_kill = Disturbance(pid, killed_at), progress.finished
                self._display.say(f"killed worker process {pid} (SIGKILL) after {progress.finished} emails")

    def _is_done(self) -> bool:
        if self._kill is None or self._progress.finished < self._progress.enqueued:
            return False
        counts = self._progress.counts
        return len(asyncio.run(_read_dlq(self._host.settings))) >= counts[Status.FAILED] + counts[Status.HELD] + 1

    def _is_stalled(self) -> bool:
        """Whether the demo must give up, because `dispatcher run` exited or the emails make too little progress.
        Reports the reason."""
        longest_seconds = STALL_SECONDS * 2 + self._options.emails / SLOWEST_EMAILS_PER_SECOND
        if self._host.exit_report() is not None:
            why = "`dispatcher run` exited before SIGTERM"
        elif time.monotonic() - self._changed_at > STALL_SECONDS:
            why = f"no email changed its status for {STALL_SECONDS:.0f} s"
        elif self._progress.seconds > longest_seconds:
            why = f"the demo took longer than {longest_seconds:.0f} s"
        else:
            return False
        self._faults.append(f"{why}; {self._host.log_tail()}")
        return True

    def _report(self, seconds: float) -> Report:
        application, events = self._application, self._host.events()
        killed = self._killed(events)
        known = sum(answer.acceptance == "known" for answer in application.answers)
        if killed is None:
            self._faults.append("the relay's log does not report the recovery of the killed worker's emails")
        if known != application.repeated:
            self._faults.append(
                f"{application.repeated} emails were enqueued twice; {known} enqueues found the first email"
            )
        dlq = asyncio.run(_read_dlq(self._host.settings))
        records = self._records(dlq)
        verdict = judge(records)
        statuses = Counter(row.status for row in records.rows.values())
        wrong = [
            f"{name}: {len(found)}, such as {', '.join(found[:_EXAMPLES_SHOWN])}"
            for name, found in verdict.violations.items()
        ]
        return Report(
            emails=len(application.expected_outcomes),
            sent=statuses[Status.SENT],
            failed=statuses[Status.FAILED],
            held=statuses[Status.HELD],
            pending=statuses[Status.PENDING] + statuses[Status.SENDING],
            delivered=len(records.accepted),
            held_delivered=sum(row.status == Status.HELD and i in records.accepted for i, row in records.rows.items()),
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
            seed=self._options.seed,
            workers=self._options.workers,
            smtp_latency_ms=SMTP_LATENCY_MS,
            folder=self._host.folder,
            differences=(*wrong, *self._faults),
        )

    def _records(self, dlq: Sequence[bytes]) -> Records:
        rows = {row[0]: Row(*row[1:]) for row in self._connection.execute(query("list_demo_rows"))}
        counted, found = count_emails.sync(self._connection), Counter(row.status for row in rows.values())
        entries = [entry for body in dlq if (entry := _dlq_entry(body))]
        times = read_ledger(self._host.ledger).times
        return Records(
            requested_keys=frozenset(self._application.expected_outcomes),
            refused_keys=frozenset(
                key
                for key, expected in self._application.expected_outcomes.items()
                if expected is ExpectedOutcome.REFUSED
            ),
            answers=self._application.answers,
            rows=rows,
            attempts=[RecordedAttempt(*row) for row in self._connection.execute(query("list_demo_attempts"))],
            dlq_entries=entries,
            unknown_messages=[body for body in dlq if not _dlq_entry(body)],
            garbage=frozenset({POISON}),
            accepted={UUID(email_id): count for email_id, count in times.items() if email_id},
            wire=Wire.of(read_events(self._host.wire)),
            disturbances=[self._kill] if self._kill else [],
            faults=[
                f"`dispatcher status` counts {count} {status}, but there are {found[status]} rows"
                for status, count in counted.items()
                if count != found[status]
            ],
        )

    def _killed(self, events: Sequence[Mapping[str, Any]]) -> Kill | None:
        """The killed worker, and how its emails were recovered. None if no event reports the recovery."""
        for event in events:
            if event["event"] == "ledger.settled" and self._kill:
                _, slot, pid, _ = event["worker"].split(":")  # the name is host:slot:pid:random
                if pid == str(self._kill.pid):
                    counts = (event["released"], event["recorded"], event["uncertain"])
                    return Kill(slot, self._finished_at_kill, *counts)
        return None


def _dlq_entry(body: bytes) -> DlqEntry | None:
    """Parses a message on the DLQ as a dead letter. Returns None if the message is not a dead letter."""
    try:
        found = decode(body)
    except InvalidPointer:
        return None
    return DlqEntry(found.email_id, found.status)


async def _read_dlq(settings: Settings) -> list[bytes]:
    """The bodies of the messages on the DLQ. The messages stay on the DLQ."""
    async with (
        await open_connection(settings.amqp_url, name="dispatcher demo", ca_file=settings.ca_file) as connection,
        DeadLetterQueue(connection, settings.dlq).scan() as scan,
    ):
        return [found.body async for batch in scan.batches() for found in batch]


async def _publish(settings: Settings, body: bytes) -> bool:
    """Publishes bytes to the send queue; returns whether RabbitMQ confirmed them."""
    publisher = Publisher(settings.amqp_url, settings.exchange, name="dispatcher demo", ca_file=settings.ca_file)
    try:
        return (await publisher.publish([Outgoing(settings.queue, body, message_id="poison")]))[0]
    finally:
        await publisher.close()
