"""If the API is killed under load, every acknowledged email is sent once, and only posted emails are sent."""

from __future__ import annotations

import asyncio
import signal
from contextlib import closing, suppress
from itertools import count
from uuid import UUID

import orjson
import psycopg
import pytest

from tests.abuse.raw_connection import post
from tests.acceptance.conftest import host
from tests.acceptance.harness import Host, stop
from tests.api.running_api import EMAIL
from tests.supervisor.program import Program, eventually

CLIENTS = 64
BODY = orjson.dumps(EMAIL)


__all__ = ["host"]


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A database that only one test uses, because killed processes leave sessions."""
    return own_database_url


class Clients:
    """Concurrent clients that post emails as fast as they can until the API is killed; `accepted` has each 202."""

    def __init__(self) -> None:
        self.accepted: dict[str, UUID] = {}
        self.posted: set[str] = set()

    async def post(self, port: int, life: int) -> None:
        await asyncio.gather(*(self._post(port, f"{life}-{client}") for client in range(CLIENTS)))

    async def _post(self, port: int, name: str) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            for number in count():
                key = f"{name}-{number}"
                self.posted.add(key)
                writer.write(post("/v1/emails", BODY, f"Idempotency-Key: {key}"))
                answer = await reader.readuntil(b"}")
                assert answer.startswith(b"HTTP/1.1 202"), answer
                self.accepted[key] = UUID(orjson.loads(answer.partition(b"\r\n\r\n")[2])["id"])


def started(host: Host) -> tuple[Program, int]:
    api = host.command("api", API_ADDRESS="127.0.0.1:0", API_ALLOW_ANONYMOUS="on", LOG_FORMAT="json")
    (event,) = eventually(lambda: api.events("api.started"), "the API's start")
    return api, int(event["listener"].rpartition(":")[2])


async def kill_under_load(host: Host, lives: int) -> Clients:
    """Starts API processes one after another. Each process accepts some emails, and is killed while clients wait for
    responses."""
    clients = Clients()
    for life in range(lives):
        api, port = await asyncio.to_thread(started, host)
        posting = asyncio.create_task(clients.post(port, life))
        enough = len(clients.accepted) + 20 + 7 * (life % 10)
        async with asyncio.timeout(30):
            while len(clients.accepted) < enough:  # noqa: ASYNC110 - a dictionary has no event to wait for
                await asyncio.sleep(0.001)
        api.send(signal.SIGKILL)
        await asyncio.to_thread(api.await_exit, 20)
        await posting
    await asyncio.to_thread(eventually, lambda: not has_open_sessions(host), "the end of the dead API's transactions")
    return clients


def has_open_sessions(host: Host) -> bool:
    """Whether PostgreSQL still executes, and may commit, statements of the killed API."""
    sessions = "select from pg_stat_activity where application_name = 'dispatcher api' and datname = current_database()"
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        return connection.execute(sessions).fetchone() is not None


def stored(host: Host) -> dict[str, UUID]:
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        return dict(connection.execute("select message_key, email_id from email_log").fetchall())


@pytest.mark.parametrize("lives", [2, pytest.param(50, marks=pytest.mark.slow)])
async def test_a_killed_api_loses_and_duplicates_no_accepted_email(host: Host, lives: int) -> None:
    run = host.run(WORKERS=1)
    clients = await kill_under_load(host, lives)
    keys = stored(host)

    assert {key: keys.get(key) for key in clients.accepted} == clients.accepted
    assert keys.keys() <= clients.posted
    books = await asyncio.to_thread(host.await_finished, set(keys.values()), seconds=120)
    assert (books.lost, books.duplicates, books.strangers) == (frozenset(), {}, frozenset()), books
    assert set(host.recipient.delivered()) == set(keys.values())
    stop(run)
