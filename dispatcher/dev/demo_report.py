"""What a demo came to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatcher.dev.demo_books import Books


@dataclass(frozen=True, slots=True)
class Kill:
    """The worker that was killed, and how its emails were settled, as the relay's log tells it.

    Attributes:
        worker: Its slot, such as `w0`.
        finished: How many emails were finished by then.
        released: Leases that were given back at once: nothing had left.
        recorded: Answers that had arrived and were not in the database yet; its in-flight ledger had them.
        uncertain: On the wire at that moment, without an answer.
    """

    pid: int
    worker: str
    finished: int
    released: int
    recorded: int
    uncertain: int


@dataclass(frozen=True, slots=True)
class Report:
    """The whole of it.

    Attributes:
        known: Answers to a second enqueue that named the first one's email.
        rolled_back: Emails whose transaction was rolled back.
        poison: Messages put on the send queue that point to no email.
        retried: Emails that the server deferred at least once.
        rescued: Emails that came back only when their lease had run out; the in-flight ledger makes it none.
        kill: None if no worker was killed.
        seconds: From the first enqueue until nothing was pending any more.
        latency_ms: How long the SMTP server took to answer.
        troubles: What went wrong besides the books.
        folder: Where the logs, the mail and the ledger are.
    """

    books: Books
    transactions: int
    known: int
    rolled_back: int
    poison: int
    retried: int
    rescued: int
    kill: Kill | None
    seconds: float
    seed: int
    workers: int
    latency_ms: int
    troubles: tuple[str, ...]
    folder: Path

    @property
    def differences(self) -> tuple[str, ...]:
        """Everything that is not as promised, in words."""
        return (*self.books.differences, *self.troubles)

    @property
    def balances(self) -> bool:
        """Whether everything is as promised."""
        return not self.differences

    @property
    def emails_per_second(self) -> float:
        """Emails over seconds: the kill, the retries and the server's latency included."""
        return self.books.emails / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The form that scripts rely on."""
        books = self.books
        return {
            "emails": books.emails,
            "sent": books.sent,
            "failed": books.failed,
            "held": books.held,
            "pending": books.pending,
            "delivered": books.delivered,
            "duplicates": books.duplicates,
            "lost": books.lost,
            "dlq": books.dlq,
            "seconds": round(self.seconds, 2),
            "emails_per_second": round(self.emails_per_second, 1),
            "known": self.known,
            "rolled_back": self.rolled_back,
            "poison": self.poison,
            "retried": self.retried,
            "rescued": self.rescued,
            "held_delivered": books.held_delivered,
            "killed": None if self.kill is None else _kill_json(self.kill),
            "workers": self.workers,
            "smtp_latency_ms": self.latency_ms,
            "seed": self.seed,
            "folder": str(self.folder),
            "balances": self.balances,
            "differences": list(self.differences),
        }


def _kill_json(kill: Kill) -> dict[str, Any]:
    return {
        "worker": kill.worker,
        "released": kill.released,
        "recorded": kill.recorded,
        "uncertain": kill.uncertain,
    }


def count_retried(events: Iterable[Mapping[str, Any]]) -> int:
    """How many emails were deferred at least once, by the run's log."""
    attempts = (event for event in events if event["event"] == "email.attempted")
    return len({event["email_id"] for event in attempts if event["outcome"] == "deferred"})


def count_rescued(events: Iterable[Mapping[str, Any]]) -> int:
    """How many emails waited for a lease to run out, by the run's log."""
    return sum(event["event"] == "email.rescued" for event in events)


def describe_kill(pid: int, finished: int, events: Iterable[Mapping[str, Any]]) -> Kill | None:
    """How the killed worker's emails were settled, by the run's log; None if the log has nothing of it."""
    for event in events:
        if event["event"] != "ledger.settled":
            continue
        _, slot, worker_pid, _ = event["worker"].split(":")  # host, slot, pid, random
        if worker_pid == str(pid):
            return Kill(pid, slot, finished, event["released"], event["recorded"], event["uncertain"])
    return None
