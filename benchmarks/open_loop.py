"""Enqueues emails by a schedule, at any load: `python -m benchmarks.open_loop --rate 500 --emails 5000`.

In an open loop, the arrival times are set in advance: single emails at random instants (Poisson arrivals), or batches
at equal intervals. An email's clock starts at its scheduled arrival, not when the email is enqueued. So a slow part
cannot hide its own delay (no coordinated omission). Emails that arrive during a commit are enqueued by the next commit,
as in the HTTP API. Prints a line for each email: the id, the scheduled arrival, and the end of the commit, in Unix
seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from uuid import UUID

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/open_loop.py`

from benchmarks.rig import PR_SET_PDEATHSIG, drafts
from dispatcher import Email, enqueue_many
from dispatcher.store.connections import Session, connected

LEAD_SECONDS: Final = 0.5
MAX_AT_ONCE: Final = 256
AHEAD_BATCH: Final = 1000


def schedule(rate: float, emails: int, seed: int, batch: int = 1) -> Iterator[float]:
    """Yields the arrival time of each email, in seconds from the start.

    Args:
        batch: The number of emails that arrive together. Batches arrive at equal intervals, single emails at random.
    """
    if batch > 1:
        yield from (number // batch * batch / rate for number in range(emails))
        return
    chance = random.Random(seed)
    instant = 0.0
    for _ in range(emails):
        instant += chance.expovariate(rate)
        yield instant


def read_arrivals(text: str) -> Mapping[str, tuple[float, float]]:
    """The scheduled arrival and the end of the commit for each email id."""
    rows = (line.split(" ") for line in text.splitlines())
    return {email_id: (float(scheduled), float(committed)) for email_id, scheduled, committed in rows}


def main() -> None:
    """The command line. DISPATCHER_DATABASE_URL sets the database."""
    parser = argparse.ArgumentParser(prog="benchmarks/open_loop.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, required=True, help="emails per second, on average")
    parser.add_argument("--emails", type=int, required=True, help="number of emails")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the schedule; default: 1")
    parser.add_argument("--batch", type=int, default=1, help="emails that arrive together; default: 1")
    parser.add_argument("--starts-at", type=float, help="the start in Unix seconds; default: as soon as possible")
    parser.add_argument(
        "--ahead",
        action="store_true",
        help="enqueue all emails before the start, and let them become due by the schedule: arrivals cost no CPU then",
    )
    parser.add_argument("--templated", action="store_true", help="enqueue emails with a provider's template")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    sys.stdout.write("\n".join(_enqueued(options)))


def _enqueued(options: argparse.Namespace) -> Iterator[str]:
    emails = options.emails
    prefix = f"arrival-{options.seed}"
    with connected(os.environ["DISPATCHER_DATABASE_URL"]) as connection:
        starts_at = options.starts_at or time.time() + LEAD_SECONDS
        instants = [starts_at + offset for offset in schedule(options.rate, emails, options.seed, options.batch)]
        if options.ahead:
            waiting = drafts(emails, prefix, is_templated=options.templated)
            yield from _enqueued_ahead(connection, waiting, instants)
            return
        done = 0
        while done < emails:
            time.sleep(max(0.0, instants[done] - time.time()))
            now = time.time()
            end = done + 1
            while end < min(emails, done + MAX_AT_ONCE) and instants[end] <= now:
                end += 1
            # Made now, because the caller waits for the first of many emails only for a limited time.
            waiting = drafts(end - done, prefix, first=done, is_templated=options.templated)
            answers = enqueue_many(connection, waiting, report_conflicts=True)
            committed_at = time.time()
            for answer, instant in zip(answers, instants[done:end], strict=True):
                yield f"{answer.email_id} {instant:.6f} {committed_at:.6f}"
            done = end


def _enqueued_ahead(connection: Session, waiting: Sequence[Email], instants: Sequence[float]) -> Iterator[str]:
    email_ids: list[UUID] = []
    with connection.transaction():
        for first in range(0, len(waiting), AHEAD_BATCH):
            answers = enqueue_many(connection, waiting[first : first + AHEAD_BATCH], report_conflicts=True)
            email_ids += [answer.email_id for answer in answers]
        connection.execute(
            "update dispatcher.email_log as e set publish_due_at = to_timestamp(t.due_at) "
            "from unnest(%s::uuid[], %s::double precision[]) as t (email_id, due_at) where e.email_id = t.email_id",
            (email_ids, list(instants)),
        )
    for email_id, instant in zip(email_ids, instants, strict=True):
        yield f"{email_id} {instant:.6f} {instant:.6f}"


if __name__ == "__main__":
    main()
