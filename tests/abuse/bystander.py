"""Another tenant, and whoever asks for health: `python -m tests.abuse.bystander PORT KEY PATH`, until its stdin ends.

Sends at a steady pace on a few connections, and asks for health on a new connection each time. Notes on lines in the
file at PATH when each was asked, what for, how long the answer took and what it was, by the clock of all processes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

import uvloop

from tests.abuse.wire import Wire, get, post

SENDERS: Final = 32
PER_SECOND: Final = 200.0
HEALTH_EVERY_SECONDS: Final = 0.02
EMAIL: Final = b'{"from":"shop@example.com","to":"ann@example.org","subject":"Your receipt","text":"Thank you."}'


async def _send(port: int, key: str, number: int, notes: TextIO) -> None:
    """One sender: at its share of the pace, and never more than one request at once."""
    every = SENDERS / PER_SECOND
    due_at = time.monotonic() + number * every / SENDERS
    sent = 0
    while True:
        with suppress(OSError):
            async with await Wire.open(port) as wire:
                told = "202"
                while told == "202":
                    await asyncio.sleep(max(0.0, due_at - time.monotonic()))
                    began_at = time.monotonic()
                    due_at = max(due_at + every, began_at - 1.0)  # up to a second is made good
                    sent += 1
                    named = (f"Authorization: Bearer {key}", f"Idempotency-Key: bystander-{number}-{sent}")
                    await wire.send(post("/v1/emails", EMAIL, *named))
                    told = await wire.answer()
                    _note(notes, "send", began_at, told)


async def _ask(port: int, notes: TextIO) -> None:
    """Asks for health at a steady pace, however long an answer takes."""
    due_at = time.monotonic()
    asking: set[asyncio.Task[None]] = set()
    while True:
        due_at += HEALTH_EVERY_SECONDS
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        due_at = max(due_at, time.monotonic() - 1.0)
        task = asyncio.create_task(_ask_once(port, notes))
        asking.add(task)
        task.add_done_callback(asking.discard)


async def _ask_once(port: int, notes: TextIO) -> None:
    began_at = time.monotonic()
    told = "reset"
    with suppress(OSError):
        async with await Wire.open(port) as wire:
            await wire.send(get("/healthz"))
            told = await wire.answer()
    _note(notes, "health", began_at, told)


def _note(notes: TextIO, what: str, began_at: float, told: str) -> None:
    notes.write(f"{began_at:.6f} {what} {time.monotonic() - began_at:.6f} {told}\n")


async def _run(port: int, key: str, notes: TextIO) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        works = [group.create_task(_send(port, key, number, notes)) for number in range(SENDERS)]
        works.append(group.create_task(_ask(port, notes)))
        await loop.run_in_executor(None, sys.stdin.read)
        for work in works:
            work.cancel()


def main() -> None:
    """The command line."""
    with Path(sys.argv[3]).open("w", buffering=1) as notes:
        uvloop.run(_run(int(sys.argv[1]), sys.argv[2], notes))


if __name__ == "__main__":
    main()
