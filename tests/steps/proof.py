"""Kills at every step of the protocol, and the books after each round of them.

    python -m tests.steps.proof --kills 1000 --seed 1 [--policy resend]

One `dispatcher run` goes on all the time, its processes dying again and again (see `aims`); emails are enqueued as long
as any may die, some of them to recipients that are refused or greylisted. When all of a round are dead the rest is left
to finish, and the books must balance: nothing lost, nothing twice, and held only what was on the wire at some death.
Under policy `resend` nothing is held, and an email arrived again at most once for each death with it on the wire.
The lease lasts 300 s, so nothing of it waited for a lease to run out.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import psycopg
from rich.console import Console
from rich.table import Table

from dispatcher import Email
from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import private_servers
from dispatcher.domain.status import OnUncertain
from dispatcher.store.connections import connected
from dispatcher.store.migrations import migrate
from tests.acceptance.books import Books
from tests.acceptance.harness import Host, stop
from tests.steps.aims import RELAY_STEPS, WORKER_STEPS, Kill, Range, Step
from tests.supervisor.program import eventually

SETTINGS: Final = MappingProxyType(
    {"WORKERS": 3, "PREFETCH": 12, "SMTP_CONNECTIONS": 4, "LOG_LEVEL": "error", "METRICS_ADDRESS": "off"}
)
BACKLOG: Final = 60
BATCH: Final = 40
KILLS_PER_ROUND: Final = 50
WORKERS_PER_RELAY: Final = 9
"""A relay takes longer to come back, and without one nothing is settled meanwhile."""
ROUND_SECONDS: Final = 120.0


@dataclass
class Proof:
    """What came of the kills.

    Attributes:
        kills: In order.
        books: As they stood in the end.
        enqueued: Every email.
    """

    kills: list[Kill]
    books: Books
    enqueued: set[UUID]
    policy: OnUncertain = OnUncertain.HOLD
    seconds: float = 0.0
    rounds: int = 0
    _doubt: dict[UUID, Step] = field(init=False)

    def __post_init__(self) -> None:
        self._doubt = {email_id: kill.step for kill in self.kills for email_id in kill.on_the_wire}

    @property
    def held_in_vain(self) -> set[UUID]:
        """Emails that are held and were on the wire at no death."""
        return set(self.books.by_status.get("held", ())) - self._doubt.keys()

    def held_by(self, step: Step) -> int:
        """How many are held that were on the wire when somebody last died with them, at this step."""
        return sum(self._doubt.get(email_id) is step for email_id in self.books.by_status.get("held", ()))

    def count(self, step: Step) -> int:
        """How many died there."""
        return sum(kill.step is step for kill in self.kills)

    def at(self, step: Step) -> frozenset[UUID]:
        """The emails that deaths at a step have met."""
        return frozenset().union(*(kill.emails for kill in self.kills if kill.step is step))

    @property
    def repeated_in_vain(self) -> dict[UUID, int]:
        """Emails that arrived more often than the policy allows, and how often."""
        doubts = Counter(email_id for kill in self.kills for email_id in kill.on_the_wire)
        allowed = doubts if self.policy is OnUncertain.RESEND else Counter()
        return {email_id: times for email_id, times in self.books.duplicates.items() if times > 1 + allowed[email_id]}

    def assert_balanced(self) -> None:
        """The promise, under the policy."""
        self.assert_harmless()
        assert not self.books.misannounced, f"with a dead letter, but alive: {self.books.misannounced}"

    def assert_harmless(self) -> None:
        """The same, but the DLQ may still name emails that were proved sent since."""
        assert not self.repeated_in_vain, f"too often: {self.repeated_in_vain}"
        replace(self.books, duplicates={}).assert_harmless()
        assert self.policy is OnUncertain.HOLD or not self.books.count("held"), self.books.by_status["held"]
        assert set(self.books.counts) <= {"sent", "failed", "held"}, self.books.counts
        assert not self.held_in_vain, f"held, and never on the wire: {self.held_in_vain}"


def prove(
    host: Host, *, kills: int, seed: int, policy: OnUncertain = OnUncertain.HOLD, say: Console | None = None
) -> Proof:
    """Runs until so many processes have died, and balances the books after each round.

    Args:
        kills: At least one.

    Raises:
        AssertionError: they do not balance.
    """
    proof = None
    began_at = time.monotonic()
    folder = host.folder / "range"
    folder.mkdir()
    kill_range = Range(folder, seed)
    kill_range.allow(0, 0)
    host.sink("--latency-ms", "3")
    argv = [sys.executable, "-m", "tests.steps.program", str(folder), str(seed), "SIGKILL"]
    # Whose attempts are used up in doubt is held, whatever the policy says.
    attempts = {"MAX_ATTEMPTS": 100} if policy is OnUncertain.RESEND else {}
    run = host.program(argv, "run", env=host.environment(**SETTINGS, ON_UNCERTAIN=policy.value, **attempts))
    enqueued: set[UUID] = set()
    numbers = itertools.count()
    rounds = -(-kills // KILLS_PER_ROUND)
    for done in range(1, rounds + 1):
        allowed = kills * done // rounds
        relays = allowed // (WORKERS_PER_RELAY + 1)
        kill_range.allow(allowed - relays, relays)
        _feed(host, kill_range, allowed, enqueued, numbers)
        eventually(lambda: count_unfinished(host) == 0, "the end of all emails", seconds=ROUND_SECONDS)
        books = eventually(lambda: _announced(host, enqueued), "the dead letters")
        proof = Proof(kill_range.kills(), books, enqueued, policy, time.monotonic() - began_at, done)
        if say:
            say.log(f"round {done}: {len(proof.kills)} kills, {len(enqueued)} emails, {books.counts}")
        proof.assert_balanced()
    stop(run)
    assert proof is not None
    return proof


def _feed(host: Host, kill_range: Range, kills: int, enqueued: set[UUID], numbers: Iterator[int]) -> None:
    """Keeps emails coming until so many processes have died."""

    def all_are_dead() -> bool:
        return is_fed(host, enqueued, numbers) and len(kill_range.kills()) >= kills

    eventually(all_are_dead, f"{kills} kills", seconds=ROUND_SECONDS)


def is_fed(host: Host, enqueued: set[UUID], numbers: Iterator[int]) -> bool:
    """Always; after it there is enough to do."""
    if count_unfinished(host) < BACKLOG:
        enqueued.update(host.enqueue(_email(next(numbers)) for _ in range(BATCH)))
    return True


def _email(number: int) -> Email:
    recipient = {3: "refused", 7: "greylisted"}.get(number % 10, "customer")
    return Email(
        message_key=f"email-{number}",
        sender="Shop <shop@example.com>",
        to=f"{recipient}-{number}@example.org",
        subject=f"Receipt {number}",
        text=f"Thank you for order {number}.",
    )


def count_unfinished(host: Host) -> int:
    """How many emails still have a way to go."""
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        row = connection.execute(
            "select count(*) from dispatcher.email_log where status in ('pending', 'sending')"
        ).fetchone()
    assert row is not None
    return int(row[0])


def _announced(host: Host, enqueued: set[UUID]) -> Books | None:
    books = host.books(enqueued)
    return books if books.is_announced else None


def table(proof: Proof) -> Table:
    """A line per step."""
    shown = Table("step", *("kills", "emails met", "sent", "failed", "held", "duplicates", "lost"))
    for column in shown.columns[1:]:
        column.justify = "right"
    statuses = {email_id: status for status, ids in proof.books.by_status.items() for email_id in ids}
    for step in (*WORKER_STEPS, *RELAY_STEPS):
        met = proof.at(step)
        became = Counter(statuses.get(email_id, "lost") for email_id in met)
        duplicates = sum(email_id in proof.books.duplicates for email_id in met)
        counts = (proof.count(step), len(met), became["sent"], became["failed"], proof.held_by(step), duplicates)
        shown.add_row(step.value, *map(str, counts), str(len(proof.books.lost & met)))
    books = proof.books
    shown.add_section()
    shown.add_row(
        "all",
        str(len(proof.kills)),
        str(len(proof.enqueued)),
        *(str(books.count(status)) for status in ("sent", "failed", "held")),
        str(len(books.duplicates)),
        str(len(books.lost)),
    )
    return shown


@contextmanager
def own_host(folder: Path) -> Iterator[Host]:
    """A host on servers of its own, or on those that the environment names; with a database and queues of its own."""
    name = f"steps_{secrets.token_hex(4)}"
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq", queue_type="quorum")
    with (
        private_servers(folder / "servers", progress=Console(stderr=True).log) as servers,
        psycopg.connect(servers.database_url, autocommit=True) as administration,
    ):
        administration.execute(f"create database {name}".encode())
        database_url = urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{name}"))
        with connected(database_url) as connection:
            migrate(connection)
        asyncio.run(declare(servers.amqp_url, topology))
        host = Host(folder, servers, database_url, topology)
        try:
            yield host
        finally:
            host.destroy()
            administration.execute(f"drop database {name} with (force)".encode())
            for queue in (topology.queue, topology.dlq):
                host.rabbit.delete(queue)


def main() -> None:
    """The command line."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.steps.proof", description=summary, epilog=details)
    parser.add_argument("--kills", type=int, default=1000, metavar="N", help="how many; default: 1000")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="draws the aims; default: 1")
    parser.add_argument("--policy", type=OnUncertain, choices=list(OnUncertain), default=OnUncertain.HOLD)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dispatcher-steps-") as folder, own_host(Path(folder)) as host:
        say = Console(stderr=True)
        proof = prove(host, kills=options.kills, seed=options.seed, policy=options.policy, say=say)
        console = Console()
        console.print(table(proof))
        what = f"policy {options.policy}, seed {options.seed}, {proof.seconds:.0f} s"
        console.print(f"{what}, books balanced after each of {proof.rounds} rounds")


if __name__ == "__main__":
    main()
