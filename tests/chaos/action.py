"""The type of the adversary's actions, and the code that several actions share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, Final

import pika.exceptions
import psycopg

from tests.acceptance.outages import POSTGRES
from tests.chaos.stage import StormStage

Action = Callable[[StormStage, Random], bool]
"""Causes a fault; returns False if the fault is not possible now."""

BROKEN: Final = (OSError, AssertionError, pika.exceptions.AMQPError, psycopg.Error)
"""The errors that a client gets from a server that is stopping."""


def rows_of(stage: StormStage, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """The rows of a statement; none if PostgreSQL is away."""
    if not stage.outages.is_away(POSTGRES):
        url = stage.ground.database_url
        with suppress(*BROKEN), psycopg.connect(url, autocommit=True, connect_timeout=2) as session:
            return session.execute(statement.encode(), values).fetchall()
    return []


def short_or_long(stage: StormStage, random: Random) -> float:
    """A time in seconds: either short, or so long that other hosts recover the leases (a lease plus the grace
    period)."""
    if random.random() < 0.5:
        return random.uniform(0.3, 2.0)
    return stage.plan.lease_seconds * 1.5 + random.uniform(1.0, 4.0)
