"""The type of the adversary's actions, and what several of them use."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import pika.exceptions
import psycopg

from tests.chaos.stage import StormStage

Action = Callable[[StormStage, Random], bool]
"""Disturbs something; returns whether that was possible now."""

BROKEN: Final = (OSError, AssertionError, pika.exceptions.AMQPError, psycopg.Error)
"""Errors of a server that is just stopping."""


def short_or_long(stage: StormStage, random: Random) -> float:
    """Either a moment, or longer than a lease and the grace before other hosts recover it."""
    if random.random() < 0.5:
        return random.uniform(0.3, 2.0)
    return stage.lease_seconds * 1.5 + random.uniform(1.0, 4.0)
