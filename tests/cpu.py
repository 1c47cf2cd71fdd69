"""CPU time for bounds on hostile input, on the scale of the machine on which the bounds were set.

A slower machine, or one whose cores other processes share, takes longer for the same work. So a fixed piece of work is
measured, too, at the same moment. A faster machine does not change a bound.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final

REFERENCE_SECONDS: Final = 0.015
"""What `_reference` takes on the machine on which the bounds were set."""


def takes_cpu(call: Callable[[], object], *, at_most: float) -> bool:
    """Whether one of five calls takes at most this CPU time, in seconds. The others may have been disturbed."""
    gc.freeze()  # a collection must not visit the objects of earlier tests
    try:
        return any(_timed(call) * scale() <= at_most for _ in range(5))
    finally:
        gc.unfreeze()


def scale() -> float:
    """The factor, at most 1, from seconds on this machine at this moment to seconds on the machine of the bounds."""
    return min(1.0, REFERENCE_SECONDS / min(_timed(_reference) for _ in range(2)))


def _timed(call: Callable[[], object]) -> float:
    began_at = time.thread_time()
    call()
    return time.thread_time() - began_at


def _reference() -> int:
    return sum(number * number for number in range(200_000))
