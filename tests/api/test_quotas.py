"""Several processes share a key's daily quota, and PostgreSQL's clock decides when a day ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from dispatcher.api.quotas import QuotaExhausted, Quotas, Reservation
from dispatcher.config import Settings
from dispatcher.store.api_keys import ApiKey, KeyStore, list_keys
from dispatcher.store.connections import make_pool
from tests.api.running_api import EMAIL, make_key, running

TODAY, TOMORROW = date(2030, 6, 1), date(2030, 6, 2)


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A database that only one test uses, because these tests replace PostgreSQL's clock."""
    return own_database_url


@dataclass
class Clocks:
    """A settable clock for PostgreSQL's sessions of `database_url`, and a settable monotonic clock of this host.

    PostgreSQL's clock begins ten seconds before midnight of a day in 2030.
    """

    connection: psycopg.Connection
    database_url: str
    steady: float = 1000.0

    def advance(self, seconds: float, *, steady: float | None = None) -> None:
        """Advances both clocks; the monotonic one by `steady` seconds, if given."""
        self.connection.execute("update public.clock set shown = shown + %s * interval '1 second'", [seconds])
        self.steady += seconds if steady is None else steady


@pytest.fixture
def clocks(connection: psycopg.Connection, database_url: str) -> Clocks:
    connection.execute("create table public.clock as select '2030-06-01 23:59:50+00'::timestamptz as shown")
    connection.execute(
        "create function public.clock_timestamp() returns timestamptz language sql as 'select shown from public.clock'"
    )
    return Clocks(connection, make_conninfo(database_url, options="-c search_path=public,pg_catalog"))


@pytest.fixture
async def quotas(clocks: Clocks) -> AsyncIterator[Quotas]:
    """The quotas as one API process uses them."""
    async with make_pool(clocks.database_url, name="test", size=1) as pool:
        yield Quotas(KeyStore(pool), lambda: clocks.steady)


def key_with(connection: psycopg.Connection, quota: int) -> ApiKey:
    make_key(connection, recipients_per_day=quota)
    (key,) = list_keys.sync(connection)
    return key


def counted(connection: psycopg.Connection) -> list[Any]:
    """The reserved recipients by day, from the database."""
    return connection.execute("select day, recipient_count from api_key_day order by day").fetchall()


def email_to(recipients: int) -> dict[str, Any]:
    return EMAIL | {"to": [f"r{number}@example.org" for number in range(recipients)]}


async def test_a_refused_email_leaves_the_quota_to_other_processes(
    settings: Settings, connection: psycopg.Connection
) -> None:
    token = make_key(connection, recipients_per_day=60)
    async with running(settings) as one, running(settings) as two:
        assert (await one.post("k-1", email_to(20), token=token)).status == 202

        refused = await one.post("k-2", email_to(50), token=token)
        other = await two.post("k-3", email_to(40), token=token)

    assert (refused.code, other.status) == ("quota-exceeded", 202)


async def test_a_repeated_request_leaves_the_quota_to_other_processes(
    settings: Settings, connection: psycopg.Connection
) -> None:
    token = make_key(connection, recipients_per_day=100)
    async with running(settings) as one, running(settings) as two:
        for _ in range(2):
            assert (await one.post("k-1", email_to(40), token=token)).status == 202

        assert (await two.post("k-2", email_to(50), token=token)).status == 202


async def test_the_database_decides_which_day_it_is(
    settings: Settings, clocks: Clocks, connection: psycopg.Connection
) -> None:
    token = make_key(connection, recipients_per_day=1)
    async with running(replace(settings, database_url=clocks.database_url)) as api:
        accepted = await api.post("k-1", token=token)
        refused = await api.post("k-2", token=token)

    assert (accepted.status, refused.code) == (202, "quota-exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 10


async def test_an_exhausted_quota_is_available_again_after_retry_after(
    clocks: Clocks, quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 10)

    assert await quotas.reserve(key, 10) == Reservation(key, TODAY)
    assert await quotas.reserve(key, 1) == QuotaExhausted(10)
    clocks.advance(9.5)
    assert await quotas.reserve(key, 1) == QuotaExhausted(1)
    clocks.advance(0.5)
    assert await quotas.reserve(key, 10) == Reservation(key, TOMORROW)


async def test_a_chunk_is_valid_until_its_day_ends(
    clocks: Clocks, quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 500)
    await quotas.reserve(key, 1)
    clocks.advance(9)

    await quotas.reserve(key, 1)
    assert counted(connection) == [(TODAY, 10)]

    clocks.advance(1)
    await quotas.reserve(key, 1)
    assert counted(connection) == [(TODAY, 10), (TOMORROW, 10)]


async def test_a_day_that_ends_during_a_refill_causes_no_refusal(
    clocks: Clocks, quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 500)
    await quotas.reserve(key, 1)
    clocks.advance(10, steady=9.99)

    # The process had reserved a chunk of ten recipients for the old day. The nine unused recipients do not count for
    # the new day.
    assert await quotas.reserve(key, 20) == Reservation(key, TOMORROW)
    assert counted(connection) == [(TODAY, 10), (TOMORROW, 21)]


async def test_recipients_returned_after_midnight_do_not_count_for_the_new_day(
    clocks: Clocks, quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 10)
    of_yesterday = await quotas.reserve(key, 10)
    assert isinstance(of_yesterday, Reservation)
    clocks.advance(10)
    await quotas.reserve(key, 4)

    await quotas.return_unused(of_yesterday, 10)

    assert await quotas.reserve(key, 7) == QuotaExhausted(86_400)
    assert await quotas.reserve(key, 6) == Reservation(key, TOMORROW)
    assert counted(connection) == [(TODAY, 10), (TOMORROW, 10)]


async def test_concurrent_requests_do_not_spend_what_a_refill_counts_on(
    quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 1000)
    await quotas.reserve(key, 1)

    large, small = await asyncio.gather(quotas.reserve(key, 30), quotas.reserve(key, 10))

    assert large == small == Reservation(key, TODAY)
