"""Emails share a message only if many are due and workers are fast. Then workers still get about equal parts."""

from __future__ import annotations

import dataclasses

import pytest

from dispatcher.config import Settings
from tests.broker.rabbit import Rabbit
from tests.broker.takers import StartTaker, Taker
from tests.relay.running import Start
from tests.store.books import Books
from tests.waiting import until

MOST = 16
BACKLOG = 4000


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Workers with so small a window count as fast if they take some hundred emails per second."""
    return dataclasses.replace(settings, bundle_emails=MOST, prefetch=4)


@pytest.fixture
async def takers(start: Start, settings: Settings, books: Books, start_taker: StartTaker) -> list[Taker]:
    """Two workers that have just taken a backlog."""
    takers = [await start_taker(settings.amqp_url, settings.queue) for _ in range(2)]
    books.enqueue(BACKLOG)
    await start(settings)
    await until(lambda: emails_of(takers) == BACKLOG)
    return takers


def emails_of(takers: list[Taker]) -> int:
    return sum(taker.emails for taker in takers)


async def test_the_backlog_of_fast_workers_is_published_in_large_messages_that_they_share(takers: list[Taker]) -> None:
    assert MOST / 2 < max(size for taker in takers for size in taker.sizes) <= MOST
    assert min(taker.emails for taker in takers) > BACKLOG / 4


async def test_workers_share_a_small_batch_evenly_after_a_backlog(takers: list[Taker], books: Books) -> None:
    before = [taker.emails for taker in takers]

    books.enqueue(40)
    await until(lambda: emails_of(takers) == BACKLOG + 40)

    assert min(taker.emails - emails for taker, emails in zip(takers, before, strict=True)) >= 10


async def test_each_email_of_a_trickle_has_its_own_message_after_a_backlog(takers: list[Taker], books: Books) -> None:
    before = sum(len(taker.sizes) for taker in takers)

    for number in range(1, 6):
        books.enqueue_one()
        await until(lambda: emails_of(takers) == BACKLOG + number)  # noqa: B023

    assert sum(len(taker.sizes) for taker in takers) == before + 5


async def test_without_workers_each_email_of_a_burst_has_its_own_message(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    books.enqueue(100)

    await start(settings)

    await rabbit.take_all(settings.queue, 100)
