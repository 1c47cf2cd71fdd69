"""The names of lanes, and of their send queues. The module `controls` has what operators set for lanes."""

from __future__ import annotations

import re
from typing import Final

NORMAL: Final = "normal"
"""The lane of an email if neither the email, its API key nor its sender has a lane. Its queue is DISPATCHER_QUEUE."""
DEFAULT_LANES: Final = ("urgent", NORMAL, "bulk")
"""The lanes of DISPATCHER_LANES by default, most urgent first."""
LANE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""The pattern of a lane's name."""


def send_queue(queue: str, lane: str) -> str:
    """The name of a lane's send queue; `queue` is that of the normal lane."""
    return queue if lane == NORMAL else f"{queue}.{lane}"
