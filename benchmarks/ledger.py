"""Measures the cost of the in-flight ledger per email: `python benchmarks/ledger.py`.

For one email, the worker writes to the ledger four times: when it renders the email, when the email goes on the wire,
when the answer arrives, and to clear the slot. The program shows the median time of each write over the repetitions.
Fails if any write takes 5 µs or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from uuid import UUID

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/ledger.py`

from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Accepted
from dispatcher.domain.status import OnUncertain
from dispatcher.host.ledger import Ledger

REPEATS: Final = 15
EMAILS: Final = 2_000
MAX_MICROSECONDS: Final = 5.0


def main() -> int:
    """Print a line per write; return 1 if any write takes too long."""
    argparse.ArgumentParser(prog="benchmarks/ledger.py", description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder:
        ledger = Ledger(Path(folder), worker="host:w0:17:cafe", slot="host:w0", slots=EMAILS)
        measured = [_measure(ledger) for _ in range(REPEATS)]
        ledger.close()
    medians = {name: statistics.median(repeat[name] for repeat in measured) for name in measured[0]}
    for name, microseconds in medians.items():
        print(f"{name:<28} {microseconds:6.2f} µs")
    print(f"{'total per email':<28} {sum(medians.values()):6.2f} µs")
    return int(max(medians.values()) >= MAX_MICROSECONDS)


def _measure(ledger: Ledger) -> dict[str, float]:
    """Microseconds per email of each write."""
    email_id, answer = new_email_id(), Accepted("<0198@example.com>", "250 2.0.0 queued as 4XyZ")
    slots = [_leave(ledger, email_id) for _ in range(EMAILS)]
    for slot in slots:
        ledger.clear(slot)
    slots.clear()
    return {
        "rendering begins and ends": _per_email(
            lambda _: ledger.end_rendering(ledger.begin_rendering(email_id, 1)), range(EMAILS)
        ),
        "on the wire": _per_email(lambda _: slots.append(_leave(ledger, email_id)), range(EMAILS)),
        "checks whether leases are void": _per_email(lambda _: ledger.voided_at, range(EMAILS)),
        "answered": _per_email(lambda slot: ledger.mark_answered(slot, answer, finished_at=1.0), slots),
        "clears the slot": _per_email(ledger.clear, slots),
    }


def _leave(ledger: Ledger, email_id: UUID) -> int:
    return ledger.mark_on_wire(email_id, 1, 1, provider="smtp", started_at=1.0, policy=OnUncertain.HOLD)


def _per_email(write: Callable[[int], object], slots: range | list[int]) -> float:
    began_at = time.process_time()
    for slot in list(slots):
        write(slot)
    return (time.process_time() - began_at) / EMAILS * 1e6


if __name__ == "__main__":
    sys.exit(main())
