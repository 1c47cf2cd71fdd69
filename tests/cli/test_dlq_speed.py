"""The `dlq` commands that only read are fast, including the start of the process, and do not change the DLQ."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

import psycopg
import pytest

from dispatcher.broker.connection import open_connection
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.broker.rabbit import Rabbit
from tests.cli.commandline import CommandLine
from tests.ops.dead_emails import DeadEmails
from tests.store.books import Books

LETTERS = 1000
LOOKS = 25
MAX_SECONDS = 0.3
MAX_STARTS = 12
"""The time limit on a busy machine, in starts of an empty Python program. On an idle machine this is about
MAX_SECONDS."""


def start_empty_program() -> None:
    """Starts a Python program that does nothing. No command can be faster."""
    subprocess.run([sys.executable, "-c", "pass"], check=True)


@pytest.mark.slow
async def test_reading_a_thousand_dead_letters_is_quick_and_changes_nothing(
    prepared: CommandLine, connection: psycopg.Connection, servers: Servers, topology: Topology
) -> None:
    async with await open_connection(servers.amqp_url, name="test") as opened:
        dead_emails = DeadEmails(Books(connection), Rabbit(opened), topology)
        email_ids = dead_emails.create(LETTERS)
        await dead_emails.publish_dead_letters(email_ids)
        dlq = DeadLetterQueue(opened, topology.dlq)
        async with dlq.scan() as look:
            before = [found.body async for batch in look.batches() for found in batch]

        seconds: dict[str, list[float]] = {"list": [], "show": [], "show --no-queue": []}
        starts: list[float] = []
        for email_id in email_ids[::-1][:LOOKS]:
            began = time.perf_counter()
            start_empty_program()
            starts.append(time.perf_counter() - began)
            for words in (("list",), ("show", str(email_id)), ("show", str(email_id), "--no-queue")):
                began = time.perf_counter()
                ended = prepared("dlq", *words)
                seconds[" ".join([words[0], *words[2:]])].append(time.perf_counter() - began)
                assert ended.code == 0, ended.stderr
                assert await dlq.depth() == LETTERS
        async with dlq.scan() as look:
            after = [found.body async for batch in look.batches() for found in batch]

    assert after == before
    figures = [f"{name}: {median(found):.3f} s, at most {max(found):.3f} s" for name, found in seconds.items()]
    start = median(starts)
    print("\n".join([*figures, f"an empty Python program: {start:.3f} s, at most {max(starts):.3f} s"]))
    assert max(map(median, seconds.values())) < max(MAX_SECONDS, MAX_STARTS * start), figures
