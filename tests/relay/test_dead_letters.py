"""Tests how often the relay queries for due dead letters. The outbox is real; RabbitMQ is not used."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatcher.broker.publisher import Publisher
from dispatcher.domain.retry import Backoff
from dispatcher.relay.dead_letters import DeadLetterPublisher
from dispatcher.relay.queues import QueueWriter
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import Outbox
from tests.relay.running import free_process_slot


@pytest.fixture
async def outbox(tables_url: str) -> AsyncIterator[Outbox]:
    """The relay's outbox."""
    async with await connect_async(tables_url, name="relay") as session:
        yield Outbox(session)


@pytest.mark.parametrize("is_last", [False, True])
async def test_after_an_empty_round_the_next_query_is_delayed(outbox: Outbox, is_last: bool) -> None:
    publisher = Publisher("amqp://nobody:secret@127.0.0.1:1/%2F", "exchange", name="test relay")
    writer = QueueWriter(publisher, free_process_slot(), Backoff(1.0, 1.0), "dlq", kind="dlq")
    dead_letters = DeadLetterPublisher(writer, "dlq")

    assert [await dead_letters.publish_due(outbox, is_last=is_last) for _ in range(2)] == [False, False]
