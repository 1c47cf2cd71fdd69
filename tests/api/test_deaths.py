"""The API is killed under load: what clients were told is true, is sent once, and nothing is sent unasked."""

from __future__ import annotations

import asyncio
import signal
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from uuid import UUID

import orjson
import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.acceptance.harness import Host, stop
from tests.api.place import EMAIL
from tests.supervisor.program import Program, eventually

CLIENTS = 64


class Clients:
    """Post as fast as they can, each its own keys, whatever happens to the API.

    Attributes:
        told: The id of each key that was answered with 202.
        asked: Every key that was ever posted.
    """

    def __init__(self) -> None:
        self.told: dict[str, UUID] = {}
        self.asked: set[str] = set()

    async def post(self, port: int, life: int) -> None:
        """Until the API is gone."""
        await asyncio.gather(*(self._post(port, f"{life}-{client}") for client in range(CLIENTS)))

    async def _post(self, port: int, name: str) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return
        with suppress(ConnectionError, asyncio.IncompleteReadError), closing(writer):
            for number in count():
                key = f"{name}-{number}"
                self.asked.add(key)
                writer.write(request(key))
                answer = await reader.readuntil(b"}")
                assert answer.startswith(b"HTTP/1.1 202"), answer
                self.told[key] = UUID(orjson.loads(answer.partition(b"\r\n\r\n")[2])["id"])


def request(key: str) -> bytes:
    """One email's, whole."""
    body = orjson.dumps(EMAIL)
    head = f"POST /v1/emails HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nIdempotency-Key: {key}"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def started(host: Host) -> tuple[Program, int]:
    """An API that answers, and its port."""
    api = host.command("api", API_ADDRESS="127.0.0.1:0", API_ALLOW_ANONYMOUS="on", LOG_FORMAT="json")
    (event,) = eventually(lambda: api.events("api.started"), "the API's start")
    return api, int(event["listener"].rpartition(":")[2])


async def kill_under_load(host: Host, lives: int) -> Clients:
    """Each life accepts some emails, and ends by SIGKILL while clients wait for answers."""
    clients = Clients()
    for life in range(lives):
        api, port = await asyncio.to_thread(started, host)
        posting = asyncio.create_task(clients.post(port, life))
        enough = len(clients.told) + 20 + 7 * (life % 10)
        async with asyncio.timeout(30):
            while len(clients.told) < enough:  # noqa: ASYNC110 - what is awaited can wake nobody
                await asyncio.sleep(0.001)
        api.send(signal.SIGKILL)
        await asyncio.to_thread(api.await_exit, 20)
        await posting
    await asyncio.to_thread(eventually, lambda: not inserting(host), "the end of what it had begun to insert")
    return clients


def inserting(host: Host) -> bool:
    """Whether PostgreSQL still works for an API that is dead: what it was told before, it commits."""
    sessions = "select from pg_stat_activity where application_name = 'dispatcher api' and datname = current_database()"
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        return connection.execute(sessions).fetchone() is not None


async def check(host: Host, lives: int) -> None:
    run = host.run()
    clients = await kill_under_load(host, lives)
    keys = stored(host)

    assert {key: keys.get(key) for key in clients.told} == clients.told
    assert keys.keys() <= clients.asked
    books = await asyncio.to_thread(host.await_finished, set(keys.values()), seconds=120)
    assert (books.lost, books.duplicates, books.strangers) == (frozenset(), {}, frozenset()), books
    assert set(host.recipient.delivered()) == set(keys.values())
    stop(run)


def stored(host: Host) -> dict[str, UUID]:
    """Every email's id by its key."""
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        return dict(connection.execute("select message_key, email_id from email_log").fetchall())


@pytest.fixture
def host(tmp_path: Path, servers: Servers, database_url: str, topology: Topology) -> Host:
    """A host of this test's own."""
    return Host(tmp_path, servers, database_url, topology)


async def test_an_api_that_is_killed_keeps_its_word(host: Host) -> None:
    try:
        await check(host, 2)
    finally:
        host.destroy()


@pytest.mark.slow
async def test_fifty_deaths_cost_nothing(host: Host) -> None:
    try:
        await check(host, 50)
    finally:
        host.destroy()
