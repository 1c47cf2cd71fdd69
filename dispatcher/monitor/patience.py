"""Waiting for a server no longer than one likes, however long its client takes to give up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises, if that is soon enough.

    `asyncio.timeout` is not enough where the work is a statement: psycopg answers its cancellation by asking the server
    to cancel, and waits for the server's word. Here the work ends on its own, and nobody waits for that.

    Raises:
        TimeoutError: it was not.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not done:
        _abandon(task)
        raise TimeoutError
    return task.result()


_abandoned: set[asyncio.Task[Any]] = set()
"""Held until they end: the loop itself holds tasks weakly."""


def _abandon(task: asyncio.Task[Any]) -> None:
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that the loop does not complain
