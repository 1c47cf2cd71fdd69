"""A ceiling that holds over workers: tokens in PostgreSQL, counted against PostgreSQL's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest

from dispatcher.routing.rate import BURST_SECONDS, RateLimit
from dispatcher.store.connections import Pool, make_pool
from dispatcher.store.providers import ProviderStore

CEILING = 500.0


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    """Sessions for two workers."""
    opened = make_pool(database_url, name="test rate", size=2)
    await opened.open()
    yield opened
    await opened.close()


def database_clock(connection: psycopg.Connection) -> float:
    row = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    assert row is not None
    return float(row[0])


async def test_two_workers_together_never_exceed_the_ceiling(pool: Pool, connection: psycopg.Connection) -> None:
    limits = [RateLimit(ProviderStore(pool, slot=f"w{n}"), "smtp", CEILING) for n in range(2)]
    began = database_clock(connection)

    async def take(limit: RateLimit, emails: int) -> None:
        for _ in range(emails):
            await limit.take()

    await asyncio.gather(*(take(limit, 150) for limit in limits))

    seconds = database_clock(connection) - began
    assert CEILING * (seconds + BURST_SECONDS) >= 300


async def test_no_more_than_the_burst_was_saved_up(pool: Pool, connection: psycopg.Connection) -> None:
    store = ProviderStore(pool, slot="w0")
    await store.begin_rate("smtp", CEILING)
    connection.execute("update provider_rate set refilled_at = now() - interval '1 hour'")

    tokens, rate = await store.take_tokens("smtp", ceiling=CEILING, burst=50, wanted=10_000)

    assert (tokens, rate) == (50, CEILING)


async def test_throttling_halves_the_rate_once_and_it_climbs_back(pool: Pool, connection: psycopg.Connection) -> None:
    store = ProviderStore(pool, slot="w0")
    await store.begin_rate("smtp", CEILING)

    halved = [await store.halve_rate("smtp", CEILING) for _ in range(5)]
    assert halved == [CEILING / 2, None, None, None, None]

    connection.execute("update provider_rate set refilled_at = now() - interval '5 seconds'")
    _, rate = await store.take_tokens("smtp", ceiling=CEILING, burst=50, wanted=1)
    assert rate == pytest.approx(CEILING * 3 / 4, rel=0.05)
    connection.execute("update provider_rate set refilled_at = now() - interval '1 minute'")
    _, rate = await store.take_tokens("smtp", ceiling=CEILING, burst=50, wanted=1)
    assert rate == CEILING


async def test_a_lowered_ceiling_holds_at_once(pool: Pool, connection: psycopg.Connection) -> None:
    store = ProviderStore(pool, slot="w0")
    await store.begin_rate("smtp", CEILING)

    _, rate = await store.take_tokens("smtp", ceiling=20.0, burst=5, wanted=1)

    assert rate == 20.0
