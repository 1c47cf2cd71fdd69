"""Kills processes at every step of the protocol, and checks every email after each round.

    python -m tests.steps.proof --kills 1000 --seed 1 [--policy resend]

One `dispatcher run` runs all the time, while its processes are killed again and again (see `kill_points`). In each
round, emails are enqueued until all kills of the round have happened; some recipients are rejected or greylisted. Then
the dispatcher finishes all emails, and every email is checked: none is lost or duplicated, and only emails that were on
the wire at a kill are held. With the policy `resend`, no email is held. For each kill while an email was on the wire,
the email may arrive one more time. A lease lasts 300 s, so no recovery waits for a lease to expire.
"""

from __future__ import annotations

import argparse
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
from uuid import UUID

import psycopg
from rich.console import Console
from rich.table import Table

from dispatcher import Email
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import private_servers
from dispatcher.domain.status import OnUncertain
from tests.acceptance.books import Books
from tests.acceptance.harness import Host, new_host, stop
from tests.steps.kill_points import RELAY_STEPS, WORKER_STEPS, Kill, KillPlan, Step
from tests.supervisor.program import eventually

SETTINGS: Final = MappingProxyType(
    {"WORKERS": 3, "PREFETCH": 12, "SMTP_CONNECTIONS": 4, "LOG_LEVEL": "error", "METRICS_ADDRESS": "off"}
)
BACKLOG: Final = 60
BATCH: Final = 40
KILLS_PER_ROUND: Final = 50
WORKERS_PER_RELAY: Final = 9
"""How many workers are killed for each relay. A relay takes longer to restart, and no lease is recovered without a
relay."""
ROUND_SECONDS: Final = 120.0


@dataclass
class Proof:
    """The result of a run.

    Attributes:
        kills: All kills, in order.
        books: The final state of the tables, of the queues and of the provider's ledger.
        enqueued: All enqueued emails.
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
    def needlessly_held(self) -> set[UUID]:
        """Held emails that were not on the wire at any kill."""
        return set(self.books.by_status.get("held", ())) - self._doubt.keys()

    def held_by(self, step: Step) -> int:
        """The number of held emails whose last kill on the wire was at this step."""
        return sum(self._doubt.get(email_id) is step for email_id in self.books.by_status.get("held", ()))

    def count(self, step: Step) -> int:
        """The number of kills at this step."""
        return sum(kill.step is step for kill in self.kills)

    def at(self, step: Step) -> frozenset[UUID]:
        """The emails that this step was processing when a process was killed."""
        return frozenset().union(*(kill.emails for kill in self.kills if kill.step is step))

    @property
    def excess_duplicates(self) -> dict[UUID, int]:
        """Emails that arrived more often than the policy allows, each with its number of arrivals."""
        doubts = Counter(email_id for kill in self.kills for email_id in kill.on_the_wire)
        allowed = doubts if self.policy is OnUncertain.RESEND else Counter()
        return {email_id: times for email_id, times in self.books.duplicates.items() if times > 1 + allowed[email_id]}

    def assert_balanced(self) -> None:
        """Asserts everything that the policy guarantees."""
        self.assert_harmless()
        assert not self.books.misannounced, f"with a dead letter, but alive: {self.books.misannounced}"

    def assert_harmless(self) -> None:
        """As `assert_balanced`, but allows the dead letter of an email that later evidence proved to be sent."""
        assert not self.excess_duplicates, f"too often: {self.excess_duplicates}"
        replace(self.books, duplicates={}).assert_harmless()
        assert self.policy is OnUncertain.HOLD or not self.books.count("held"), self.books.by_status["held"]
        assert set(self.books.counts) <= {"sent", "failed", "held"}, self.books.counts
        assert not self.needlessly_held, f"held, and never on the wire: {self.needlessly_held}"


def prove(
    host: Host, *, kills: int, seed: int, policy: OnUncertain = OnUncertain.HOLD, say: Console | None = None
) -> Proof:
    """Kills this number of processes during a run, and checks every email after each round.

    Args:
        kills: The number of kills, at least 1.

    Raises:
        AssertionError: An email was lost, duplicated or needlessly held.
    """
    proof = None
    began_at = time.monotonic()
    folder = host.folder / "range"
    folder.mkdir()
    kill_plan = KillPlan(folder, seed)
    kill_plan.allow(0, 0)
    host.sink("--latency-ms", "3")
    argv = [sys.executable, "-m", "tests.steps.program", str(folder), str(seed), "SIGKILL"]
    # With either policy, an uncertain email that has used up its attempts is held. So runs with `resend` allow 100
    # attempts.
    attempts = {"MAX_ATTEMPTS": 100} if policy is OnUncertain.RESEND else {}
    run = host.program(argv, "run", env=host.environment(**SETTINGS, ON_UNCERTAIN=policy.value, **attempts))
    enqueued: set[UUID] = set()
    numbers = itertools.count()
    rounds = -(-kills // KILLS_PER_ROUND)
    for done in range(1, rounds + 1):
        allowed = kills * done // rounds
        relays = allowed // (WORKERS_PER_RELAY + 1)
        kill_plan.allow(allowed - relays, relays)
        _feed(host, kill_plan, allowed, enqueued, numbers)
        eventually(lambda: count_unfinished(host) == 0, "the end of all emails", seconds=ROUND_SECONDS)
        books = eventually(lambda: _announced(host, enqueued), "the dead letters")
        proof = Proof(kill_plan.kills(), books, enqueued, policy, time.monotonic() - began_at, done)
        if say:
            say.log(f"round {done}: {len(proof.kills)} kills, {len(enqueued)} emails, {books.counts}")
        proof.assert_balanced()
    stop(run)
    assert proof is not None
    return proof


def _feed(host: Host, kill_plan: KillPlan, kills: int, enqueued: set[UUID], numbers: Iterator[int]) -> None:
    """Keeps enqueueing emails until this number of processes have been killed."""

    def all_are_dead() -> bool:
        return is_fed(host, enqueued, numbers) and len(kill_plan.kills()) >= kills

    eventually(all_are_dead, f"{kills} kills", seconds=ROUND_SECONDS)


def is_fed(host: Host, enqueued: set[UUID], numbers: Iterator[int]) -> bool:
    """Enqueues more emails if few emails are unfinished; returns True."""
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
    """The number of unfinished emails."""
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
    """A table with one line per step."""
    shown = Table("step", "kills", "emails met", "held")
    for step in (*WORKER_STEPS, *RELAY_STEPS):
        counts = (proof.count(step), len(proof.at(step)), proof.held_by(step))
        shown.add_row(step.value, *map(str, counts))
    shown.add_section()
    shown.add_row("all", str(len(proof.kills)), f"{len(proof.enqueued)} enqueued", str(proof.books.counts))
    return shown


@contextmanager
def own_host(folder: Path) -> Iterator[Host]:
    """A host with a separate database and queues, on private servers or on the servers that the environment variables
    set."""
    name = f"steps_{secrets.token_hex(4)}"
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq", queue_type="quorum")
    with (
        private_servers(folder / "servers", progress=Console(stderr=True).log) as servers,
        new_host(folder, servers, topology) as host,
    ):
        yield host
        for queue in topology.queues:
            host.rabbit.delete(queue)


def main() -> None:
    """The command line."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.steps.proof", description=summary, epilog=details)
    parser.add_argument("--kills", type=int, default=1000, metavar="N", help="how many; default: 1000")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the random seed of the targets; default: 1")
    parser.add_argument("--policy", type=OnUncertain, choices=list(OnUncertain), default=OnUncertain.HOLD)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dispatcher-steps-") as folder, own_host(Path(folder)) as host:
        say = Console(stderr=True)
        proof = prove(host, kills=options.kills, seed=options.seed, policy=options.policy, say=say)
        console = Console()
        console.print(table(proof))
        what = f"policy {options.policy}, seed {options.seed}, {proof.seconds:.0f} s"
        console.print(f"{what}, the promise was kept in each of {proof.rounds} rounds")


if __name__ == "__main__":
    main()
