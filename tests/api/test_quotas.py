"""Quotas: what one process leaves to the others, and the turn of the day, which is PostgreSQL's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from dispatcher.api.quotas import Quotas, Taken, UsedUp
from dispatcher.config import Settings
from dispatcher.store.api_keys import ApiKey, KeyStore, list_keys
from dispatcher.store.connections import make_pool
from tests.api.place import EMAIL, make_key, running

TODAY, TOMORROW = date(2030, 6, 1), date(2030, 6, 2)


@dataclass
class Clocks:
    """PostgreSQL's clock, as sessions of `database_url` read it, and this host's steady one.

    Both begin ten seconds before the midnight of a day in 2030.
    """

    connection: psycopg.Connection
    database_url: str
    steady: float = 1000.0

    def advance(self, seconds: float, *, steady: float | None = None) -> None:
        """Lets time pass, for both alike unless said otherwise."""
        self.connection.execute("update public.clock set shown = shown + %s * interval '1 second'", [seconds])
        self.steady += seconds if steady is None else steady


@pytest.fixture
def clocks(connection: psycopg.Connection, database_url: str) -> Clocks:
    """Clocks that the test moves."""
    connection.execute("create table public.clock as select '2030-06-01 23:59:50+00'::timestamptz as shown")
    connection.execute(
        "create function public.clock_timestamp() returns timestamptz language sql as 'select shown from public.clock'"
    )
    return Clocks(connection, make_conninfo(database_url, options="-c search_path=public,pg_catalog"))


@pytest.fixture
async def quotas(clocks: Clocks) -> AsyncIterator[Quotas]:
    """A process's."""
    async with make_pool(clocks.database_url, name="test", size=1) as pool:
        yield Quotas(KeyStore(pool), lambda: clocks.steady)


def key_with(connection: psycopg.Connection, quota: int) -> ApiKey:
    make_key(connection, recipients_per_day=quota)
    (key,) = list_keys(connection)
    return key


def counted(connection: psycopg.Connection) -> list[Any]:
    """How many recipients were taken of each day."""
    return connection.execute("select day, recipient_count from api_key_day order by day").fetchall()


def email_to(recipients: int) -> dict[str, Any]:
    return EMAIL | {"to": [f"r{number}@example.org" for number in range(recipients)]}


async def test_an_email_with_too_many_recipients_takes_nothing_from_other_processes(
    settings: Settings, connection: psycopg.Connection
) -> None:
    token = make_key(connection, recipients_per_day=60)
    async with running(settings) as one, running(settings) as two:
        assert (await one.post("k-1", email_to(20), token=token)).status == 202

        refused = await one.post("k-2", email_to(50), token=token)
        other = await two.post("k-3", email_to(40), token=token)

    assert (refused.code, other.status) == ("quota-exceeded", 202)


async def test_a_replay_takes_nothing_from_other_processes(settings: Settings, connection: psycopg.Connection) -> None:
    token = make_key(connection, recipients_per_day=100)
    async with running(settings) as one, running(settings) as two:
        for _ in range(2):
            assert (await one.post("k-1", email_to(40), token=token)).status == 202

        assert (await two.post("k-2", email_to(50), token=token)).status == 202


async def test_a_database_in_another_day_is_believed(
    settings: Settings, clocks: Clocks, connection: psycopg.Connection
) -> None:
    token = make_key(connection, recipients_per_day=1)
    async with running(replace(settings, database_url=clocks.database_url)) as api:
        accepted = await api.post("k-1", token=token)
        refused = await api.post("k-2", token=token)

    assert (accepted.status, refused.code) == (202, "quota-exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 10


async def test_a_quota_that_is_used_up_is_there_again_as_soon_as_it_said(
    clocks: Clocks, quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 10)

    assert await quotas.take(key, 10) == Taken(key, TODAY)
    assert await quotas.take(key, 1) == UsedUp(10)
    clocks.advance(9.5)
    assert await quotas.take(key, 1) == UsedUp(1)
    clocks.advance(0.5)
    assert await quotas.take(key, 10) == Taken(key, TOMORROW)


async def test_what_a_process_holds_of_a_day_is_good_until_its_end(
    clocks: Clocks, quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 500)
    await quotas.take(key, 1)
    clocks.advance(9)

    await quotas.take(key, 1)
    assert counted(connection) == [(TODAY, 10)]

    clocks.advance(1)
    await quotas.take(key, 1)
    assert counted(connection) == [(TODAY, 10), (TOMORROW, 10)]


async def test_a_day_that_ends_while_the_database_is_asked_refuses_nobody(
    clocks: Clocks, quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 500)
    await quotas.take(key, 1)
    clocks.advance(10, steady=9.99)

    # Nine of yesterday's were counted upon.
    assert await quotas.take(key, 20) == Taken(key, TOMORROW)
    assert counted(connection) == [(TODAY, 10), (TOMORROW, 21)]


async def test_what_comes_back_after_midnight_is_not_todays(
    clocks: Clocks, quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 10)
    yesterdays = await quotas.take(key, 10)
    assert isinstance(yesterdays, Taken)
    clocks.advance(10)
    await quotas.take(key, 4)

    await quotas.give_back(yesterdays, 10)

    assert await quotas.take(key, 7) == UsedUp(86_400)
    assert await quotas.take(key, 6) == Taken(key, TOMORROW)
    assert counted(connection) == [(TODAY, 10), (TOMORROW, 10)]


async def test_requests_at_once_do_not_spend_what_one_of_them_counts_upon(
    quotas: Quotas, connection: psycopg.Connection
) -> None:
    key = key_with(connection, 1000)
    await quotas.take(key, 1)

    large, small = await asyncio.gather(quotas.take(key, 30), quotas.take(key, 10))

    assert large == small == Taken(key, TODAY)
