"""Acts as another tenant and as a health check until stdin ends: `python -m tests.abuse.bystander PORT KEY PATH`.

It enqueues emails at a steady rate on a few connections, and requests /healthz on a new connection each time. For each
request it writes a line to PATH: the start (monotonic clock), the kind, the duration in seconds, and the result.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

import uvloop

from tests.abuse.raw_connection import RawConnection, get, post

SENDERS: Final = 32
PER_SECOND: Final = 200.0
HEALTH_EVERY_SECONDS: Final = 0.02
EMAIL: Final = b'{"from":"shop@example.com","to":"ann@example.org","subject":"Your receipt","text":"Thank you."}'


async def _send(port: int, key: str, number: int, notes: TextIO) -> None:
    """Enqueues emails on one connection, at this connection's share of the rate. Waits for each response before the
    next request."""
    every = SENDERS / PER_SECOND
    due_at = time.monotonic() + number * every / SENDERS
    sent = 0
    while True:
        with suppress(OSError):
            async with await RawConnection.open(port) as connection:
                result = "202"
                while result == "202":
                    await asyncio.sleep(max(0.0, due_at - time.monotonic()))
                    began_at = time.monotonic()
                    due_at = max(due_at + every, began_at - 1.0)  # never more than one second behind schedule
                    sent += 1
                    named = (f"Authorization: Bearer {key}", f"Idempotency-Key: bystander-{number}-{sent}")
                    await connection.send(post("/v1/emails", EMAIL, *named))
                    result = await connection.answer()
                    _note(notes, "send", began_at, result)


async def _check_health(port: int, notes: TextIO) -> None:
    """Requests /healthz at a steady rate, even if responses are slow."""
    due_at = time.monotonic()
    checks: set[asyncio.Task[None]] = set()
    while True:
        due_at += HEALTH_EVERY_SECONDS
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        due_at = max(due_at, time.monotonic() - 1.0)
        task = asyncio.create_task(_check_health_once(port, notes))
        checks.add(task)
        task.add_done_callback(checks.discard)


async def _check_health_once(port: int, notes: TextIO) -> None:
    began_at = time.monotonic()
    result = "reset"
    with suppress(OSError):
        async with await RawConnection.open(port) as connection:
            await connection.send(get("/healthz"))
            result = await connection.answer()
    _note(notes, "health", began_at, result)


def _note(notes: TextIO, what: str, began_at: float, result: str) -> None:
    notes.write(f"{began_at:.6f} {what} {time.monotonic() - began_at:.6f} {result}\n")


async def _run(port: int, key: str, notes: TextIO) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        works = [group.create_task(_send(port, key, number, notes)) for number in range(SENDERS)]
        works.append(group.create_task(_check_health(port, notes)))
        await loop.run_in_executor(None, sys.stdin.read)
        for work in works:
            work.cancel()


def main() -> None:
    with Path(sys.argv[3]).open("w", buffering=1) as notes:
        uvloop.run(_run(int(sys.argv[1]), sys.argv[2], notes))


if __name__ == "__main__":
    main()
