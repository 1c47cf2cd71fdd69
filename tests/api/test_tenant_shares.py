"""What one tenant's requests occupy, however many they are, leaves the other tenants their sessions and look-ups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from uuid import UUID

import psycopg
import pytest

from dispatcher.api.ops_page.site import CONCURRENT_PAGES
from dispatcher.api.server import OPS_SESSIONS
from dispatcher.config import Settings
from dispatcher.domain.api_key import Secret
from tests.api.ops_page.browsing import Browser
from tests.api.running_api import EMAIL, Answer, Api, make_key, running
from tests.store.suppressing import hasher_of
from tests.waiting import until

FLOOD: Final = 12
ALL: Final = ["send", "read", "operate"]


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A database that only one test uses, because the tests lock tables."""
    return own_database_url


@contextmanager
def other_transaction(database_url: str, statement: str) -> Iterator[psycopg.Connection]:
    """A transaction that has executed a statement, and keeps its locks during the block."""
    with psycopg.connect(database_url, application_name="test session") as outside:
        outside.execute(statement.encode())
        yield outside
        outside.rollback()


async def begun(
    api: Api, connection: psycopg.Connection, request: Callable[[], Awaitable[Answer]]
) -> list[asyncio.Task[Answer]]:
    """Sends requests that wait for a lock, or for each other. Returns when all of them have arrived."""
    tasks = [asyncio.ensure_future(request()) for _ in range(FLOOD)]
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    await until(lambda: connection.execute(waiting).fetchall()[0][0] > 0)
    for _ in range(2 * FLOOD):
        assert (await api.get("/healthz")).status == 200
    return tasks


async def test_operators_requests_of_one_tenant_leave_sessions_to_other_tenants_and_to_recipients(
    api: Api, connection: psycopg.Connection
) -> None:
    email_id = UUID((await api.post("a", EMAIL)).json["id"])
    token = hasher_of(connection).unsubscribe_token(email_id, "ann@example.org")
    first, second, third = (make_key(connection, tenant_id=tenant, scopes=ALL) for tenant in ("a", "b", None))
    pause = "insert into dispatcher.pause (scope, name, reason, actor) values ('tenant', 'a', 'test', 'test')"
    reason = {"reason": "test"}

    with other_transaction(api.settings.database_url, pause):
        flood = await begun(api, connection, lambda: api.call("POST", "/v1/pauses", body=reason, token=first))
        others = await asyncio.gather(
            api.get("/v1/pauses", token=second),
            api.get("/v1/webhooks", token=second),
            api.get("/v1/suppressions", token=second),
            api.call("POST", "/v1/emails/cancel", body=reason | {"all": True}, token=second),
            api.call("POST", "/v1/webhooks", body=reason | {"url": "https://example.org/"}, token=second),
            api.get("/v1/webhooks?tenant_id=a", token=third),
            api.call("POST", f"/v1/unsubscribe/{token}", raw=b""),
        )
        answered = sum(task.done() for task in flood)
    await asyncio.gather(*flood)

    assert [answer.status for answer in others] == [200, 200, 200, 200, 201, 200, 200]
    assert answered < FLOOD / 2


@pytest.mark.parametrize(
    ("table", "slow", "quick"),
    [
        ("email_content", "/v1/emails?tag=x", "/v1/emails?status=pending"),
        ("outgoing_event", "/v1/events", "/v1/emails"),
    ],
)
async def test_look_ups_of_one_tenant_do_not_delay_those_of_another(
    api: Api, connection: psycopg.Connection, table: str, slow: str, quick: str
) -> None:
    await api.post("a", EMAIL | {"tenant_id": "a"})
    first, second = (make_key(connection, tenant_id=tenant) for tenant in ("a", "b"))

    with other_transaction(api.settings.database_url, f"lock table dispatcher.{table} in access exclusive mode"):
        flood = await begun(api, connection, lambda: api.get(slow, token=first))
        others = [await api.get(quick, token=second) for _ in range(FLOOD)]
        answered = sum(task.done() for task in flood)
    await asyncio.gather(*flood)

    assert [answer.status for answer in others] == [200] * FLOOD
    assert answered < FLOOD / 2


def waiting_pages(connection: psycopg.Connection) -> int:
    """How many sessions of the operators' page wait for a lock."""
    waiting = (
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        " and application_name = 'dispatcher api ops'"
    )
    return int(connection.execute(waiting).fetchall()[0][0])


async def test_pages_of_one_tenant_leave_turns_and_sessions_to_other_tenants(
    settings: Settings, connection: psycopg.Connection
) -> None:
    keys = [make_key(connection, tenant_id=tenant, scopes=ALL) for tenant in ("a", "b")]
    async with running(replace(settings, ops=True)) as api:
        first, second = Browser(api), Browser(api)
        await first.sign_in(keys[0])
        await second.sign_in(keys[1])
        await api.post("a", EMAIL, token=keys[0])
        lock = "lock table dispatcher.email_content in access exclusive mode"
        with other_transaction(settings.database_url, lock):
            flood = [asyncio.ensure_future(first.get("/ops/emails?tag=x")) for _ in range(FLOOD)]
            await until(lambda: waiting_pages(connection) == CONCURRENT_PAGES // 2)
            pages = [await second.get("/ops/emails") for _ in range(3)]
            occupied = waiting_pages(connection)
        await asyncio.gather(*flood)

    assert [page.status for page in pages] == [200] * 3
    assert occupied <= CONCURRENT_PAGES // 2 < OPS_SESSIONS


async def test_requests_for_pages_that_do_not_exist_leave_sessions_to_other_requests(
    settings: Settings, connection: psycopg.Connection
) -> None:
    key = make_key(connection, tenant_id="a", scopes=ALL)
    async with running(replace(settings, ops=True)) as api:
        stranger = Browser(api)
        await stranger.sign_in(key)
        lock = "lock table dispatcher.ops_session in access exclusive mode"
        with other_transaction(settings.database_url, lock):
            flood = [asyncio.ensure_future(stranger.get("/ops/nothing")) for _ in range(FLOOD)]
            await until(lambda: waiting_pages(connection) > 0)
            for _ in range(2 * FLOOD):
                assert (await api.get("/healthz")).status == 200
            occupied = waiting_pages(connection)
        answers = await asyncio.gather(*flood)

    assert [answer.status for answer in answers] == [404] * FLOOD
    assert occupied <= CONCURRENT_PAGES // 2 < OPS_SESSIONS


async def test_unknown_keys_do_not_delay_known_ones(api: Api, connection: psycopg.Connection) -> None:
    known = make_key(connection)
    assert (await api.get("/v1/emails", token=known)).status == 200

    with other_transaction(api.settings.database_url, "lock table dispatcher.api_key in access exclusive mode"):
        flood = await begun(api, connection, lambda: api.get("/v1/emails", token=Secret.new().text()))
        answers = [await api.get("/v1/emails", token=known) for _ in range(FLOOD)]
        answered = sum(task.done() for task in flood)
    await asyncio.gather(*flood)

    assert [answer.status for answer in answers] == [200] * FLOOD
    assert answered < FLOOD / 2
