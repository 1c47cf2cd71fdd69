"""CPU time for bounds on hostile input, on the scale of the machine on which the bounds were set.

A slower machine, or one whose cores other processes share, takes longer for the same work. So a fixed piece of work is
measured, too, at the same moment. A faster machine does not change a bound.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

REFERENCE_SECONDS: Final = 0.075
"""What `_reference` takes on the machine on which the bounds were set."""


def cpu_seconds(call: Callable[[], object], *, calls: int = 3) -> float:
    """The least CPU time of some calls."""
    gc.freeze()  # a collection must not visit the objects of earlier tests
    try:
        taken = min(_timed(call) for _ in range(calls))
        reference = min(_timed(_reference) for _ in range(3))
    finally:
        gc.unfreeze()
    return taken * min(1.0, REFERENCE_SECONDS / reference)


def _timed(call: Callable[[], object]) -> float:
    began_at = time.thread_time()
    call()
    return time.thread_time() - began_at


def _reference() -> int:
    return sum(number * number for number in range(1_000_000))
