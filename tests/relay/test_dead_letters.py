"""When the relay looks for dead letters, with a real outbox and no RabbitMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.publisher import Publisher
from dispatcher.domain.backoff import Backoff
from dispatcher.relay.dead_letters import DeadLetters
from dispatcher.relay.queue_writer import QueueWriter
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import Outbox
from tests.relay.running import free_seat


@pytest.fixture
async def outbox(tables_url: str) -> AsyncIterator[Outbox]:
    """The relay's statements."""
    async with await connect_async(tables_url, name="relay") as session:
        yield Outbox(session)


@pytest.mark.parametrize("is_last", [False, True])
async def test_a_look_that_finds_nothing_asks_for_no_other_at_once(outbox: Outbox, is_last: bool) -> None:
    publisher = Publisher("amqp://nobody:secret@127.0.0.1:1/%2F", "exchange", name="test relay")
    writer = QueueWriter(publisher, free_seat(), Backoff(1.0, 1.0), "dlq", kind="dlq")
    dead_letters = DeadLetters(writer, "dlq")

    assert [await dead_letters.look(outbox, is_last=is_last) for _ in range(2)] == [False, False]
