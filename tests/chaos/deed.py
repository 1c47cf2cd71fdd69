"""What a deed is, and what several deeds need."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import pika.exceptions
import psycopg

from tests.chaos.stage import Stage

Deed = Callable[[Stage, Random], bool]
"""Strikes somebody, and returns whether that was possible now."""

BROKEN: Final = (OSError, AssertionError, pika.exceptions.AMQPError, psycopg.Error)
"""What a server says that is just going away."""


def short_or_long(stage: Stage, random: Random) -> float:
    """A moment, or longer than a lease and the grace that its host has before another one judges it."""
    if random.random() < 0.5:
        return random.uniform(0.3, 2.0)
    return stage.lease_seconds * 1.5 + random.uniform(1.0, 4.0)
