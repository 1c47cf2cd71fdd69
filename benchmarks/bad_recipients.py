"""Bad recipients among good ones: `python benchmarks/bad_recipients.py --minutes 10 --rate 20 --bad 5`.

Emails arrive at a steady rate. At every attempt, the SMTP double temporarily refuses some recipients, each in one of
six ways (see `dispatcher.dev.smtp_sink`). The emails to these bad recipients must get the status `failed` after all
attempts, and must not delay the good emails.

The program prints the good emails' latency from the commit of the enqueue to the double's acceptance, the final status
of the bad emails of each kind, and whether emails were lost or duplicated. Exit code 1: an email was lost, duplicated,
held or left unfinished, a good email failed, a bad email did not fail, or the p99 of the good emails exceeded
`--p99-ms`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/bad_recipients.py`

from benchmarks.figures import percentile
from benchmarks.machine import machine
from benchmarks.rig import Case, Stage, stage, wait_until
from dispatcher import Email, enqueue_many
from dispatcher.dev.servers import private_servers
from dispatcher.store.connections import connected

KINDS: Final = ("busy", "limited", "unverified", "full", "closing", "hurried")
"""The kinds of bad recipients. The double's replies to RCPT are, in this order: 450 4.2.1, 450 4.7.1, 451 4.3.0, 452
4.2.2, 421 4.3.2, 421 4.7.28."""
BURST_KIND: Final = "unverified"
DOMAINS: Final = tuple(f"{name}.example" for name in ("ash", "beech", "cedar", "elm", "fir", "larch", "oak", "pine"))
START_SECONDS: Final = 60.0
FINISH_SECONDS: Final = 600.0
"""The time limit for the last attempts of bad emails after the arrivals have ended."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One enqueued email.

    Attributes:
        kind: The kind of bad recipient; None for a good recipient.
        committed_at: When the email's enqueue was committed; Unix seconds.
    """

    email_id: str
    kind: str | None
    committed_at: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of a run.

    Attributes:
        p50_ms: The median of good emails' latency, from commit to acceptance.
        bad: For each kind, the number of bad emails by status and number of attempts, such as `failed, 5 attempts`.
        pauses: How many times a worker stopped using the provider, by the logged reason.
    """

    good: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    bad: Mapping[str, Mapping[str, int]]
    good_not_sent: int
    bad_not_failed: int
    pauses: Mapping[str, int]
    lost: int
    duplicates: int
    held: int

    def is_fine(self, p99_ms: float) -> bool:
        """Whether all bad emails failed, and the good emails were not delayed."""
        wrong = self.good_not_sent + self.bad_not_failed + self.lost + self.duplicates + self.held
        return not wrong and self.p99_ms <= p99_ms


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
        stage(servers, Case("smtp", options.workers, 0), Path(folder) / "case") as scene,
    ):
        figures = _measure(scene, options, console)
    facts = {"minutes": options.minutes, "rate": options.rate, "bad_percent": options.bad, "workers": options.workers}
    if options.json:
        sys.stdout.write(json.dumps({**facts, **asdict(figures), **machine()}) + "\n")
    else:
        _print(figures)
    if not figures.is_fine(options.p99_ms):
        sys.exit(1)


def _measure(scene: Stage, options: argparse.Namespace, console: Console) -> Figures:
    arrivals: list[Arrival] = []
    with scene.running("run"):
        _warm_up(scene)
        console.log(f"{options.rate:g} emails/s for {options.minutes:g} minutes, {options.bad:g} % to bad recipients")
        _enqueue(scene.database_url, options, arrivals)
        console.log("waiting for the last attempts")
        with connected(scene.database_url) as connection:
            unfinished = "select not exists (select from dispatcher.email_log where status in ('pending', 'sending'))"
            wait_until(lambda: connection.execute(unfinished).fetchone() == (True,), FINISH_SECONDS)
    return _figures(scene, arrivals)


def _warm_up(scene: Stage) -> None:
    """Send an email, so that every part of the dispatcher has started."""
    with connected(scene.database_url) as connection:
        enqueue_many(connection, [_email(-1, None, random.Random(0))])
    wait_until(lambda: bool(scene.double.acceptances()), START_SECONDS)


def _enqueue(database_url: str, options: argparse.Namespace, arrivals: list[Arrival]) -> None:
    """Enqueue a burst, then emails by a schedule; one commit enqueues all emails that are due."""
    chance = random.Random(options.seed)
    stop, began_at, number = threading.Event(), time.monotonic(), 0
    with connected(database_url) as connection:
        burst = [_email(-2 - at, BURST_KIND, chance, f"burst{at}.example") for at in range(options.burst)]
        answers = enqueue_many(connection, burst) if burst else []
        arrivals += [Arrival(str(answer.email_id), BURST_KIND, time.time()) for answer in answers]
        while (now := time.monotonic() - began_at) < options.minutes * 60:
            kinds: list[str | None] = []
            while number + len(kinds) <= now * options.rate:
                kinds.append(chance.choice(KINDS) if chance.random() < options.bad / 100 else None)
            answers = enqueue_many(connection, [_email(number + at, kind, chance) for at, kind in enumerate(kinds)])
            committed_at = time.time()
            arrivals += [
                Arrival(str(answer.email_id), kind, committed_at) for answer, kind in zip(answers, kinds, strict=True)
            ]
            number += len(kinds)
            stop.wait(began_at + number / options.rate - time.monotonic())


def _email(number: int, kind: str | None, chance: random.Random, domain: str | None = None) -> Email:
    return Email(
        message_key=f"receipt-{number}",
        sender="Shop <shop@example.com>",
        to=f"{kind or 'customer'}-{number}@{domain or chance.choice(DOMAINS)}",
        subject=f"Your receipt {number}",
        text="Thank you for your order. It leaves our house tomorrow.\n" * 8,
    )


def _figures(scene: Stage, arrivals: Sequence[Arrival]) -> Figures:
    accepted = scene.double.acceptances()
    with connected(scene.database_url) as connection:
        rows = connection.execute("select email_id::text, status, attempt_count from dispatcher.email_log").fetchall()
    found = {email_id: (status, attempts) for email_id, status, attempts in rows}
    good = [each for each in arrivals if each.kind is None]
    bad = {kind: Counter[str]() for kind in KINDS}
    for each in arrivals:
        if each.kind is not None:
            status, attempts = found.get(each.email_id, ("lost", 0))
            bad[each.kind][f"{status}, {attempts} attempts"] += 1
    milliseconds = sorted(
        (min(accepted[each.email_id]) - each.committed_at) * 1000 for each in good if each.email_id in accepted
    )
    sent_ids = {email_id for email_id, (status, _) in found.items() if status == "sent"}
    return Figures(
        good=len(good),
        p50_ms=round(statistics.median(milliseconds), 1),
        p99_ms=round(percentile(milliseconds, 99), 1),
        max_ms=round(milliseconds[-1], 1),
        bad={kind: dict(sorted(ends.items())) for kind, ends in bad.items()},
        good_not_sent=sum(each.email_id not in sent_ids for each in good),
        bad_not_failed=sum(
            count for ends in bad.values() for end, count in ends.items() if not end.startswith("failed")
        ),
        pauses=_pauses(scene.folder / "run.log"),
        lost=len({each.email_id for each in arrivals} - found.keys()) + len(sent_ids - accepted.keys()),
        duplicates=sum(len(instants) - 1 for instants in accepted.values()),
        held=sum(status == "held" for status, _ in found.values()),
    )


def _pauses(log: Path) -> Mapping[str, int]:
    events = [json.loads(line) for line in log.read_text().splitlines() if '"provider.paused"' in line]
    return Counter(f"{event['state']}: {event['reason']}" for event in events)


def _print(figures: Figures) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title="Emails to bad recipients by final status")
    for heading in ("kind", "ended as", "emails"):
        table.add_column(heading)
    for kind, ends in figures.bad.items():
        for end, count in ends.items():
            table.add_row(kind, end, str(count))
    console.print(table)
    console.print(
        f"good emails: {figures.good}; commit to accepted: p50 {figures.p50_ms:g} ms, p99 {figures.p99_ms:g} ms, "
        f"worst {figures.max_ms:g} ms; not sent: {figures.good_not_sent}"
    )
    console.print(
        f"pauses of the provider: {dict(figures.pauses) or 'none'}; lost: {figures.lost}, "
        f"duplicates: {figures.duplicates}, held: {figures.held}"
    )


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/bad_recipients.py", description=summary, epilog=details)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="how long emails arrive; default: 10")
    parser.add_argument("--rate", type=float, default=21.0, metavar="N", help="emails per second; default: 21")
    parser.add_argument("--bad", type=float, default=5.0, metavar="N", help="percent with a bad recipient; default: 5")
    parser.add_argument("--burst", type=int, default=0, metavar="N", help=(
        "number of bad emails, each to a separate domain, that arrive together at the beginning; default: 0"
    ))  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="random seed of the recipients; default: 1")
    parser.add_argument(
        "--p99-ms", type=float, default=2000.0, metavar="N", help="limit for the good emails; default: 2000"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
