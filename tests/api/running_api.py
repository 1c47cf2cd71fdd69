"""A real API server in the test's event loop, with a separate database and queues, and a client of the API."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import psycopg
from psycopg import sql
from pyreqwest.client import Client, ClientBuilder

from dispatcher.admission.process import listen
from dispatcher.api.server import serve
from dispatcher.broker.topology import Topology
from dispatcher.config import Settings, load
from dispatcher.domain.api_key import Secret
from dispatcher.events.sns_certificates import Fetch
from tests.waiting import DEADLINE_SECONDS

EMAIL: Final[dict[str, Any]] = {
    "from": "shop@example.com",
    "to": ["ann@example.org"],
    "subject": "Your receipt",
    "text": "Thank you.",
}
UNREACHABLE_AMQP_URL: Final = "amqp://guest:guest@127.0.0.1:1/%2F"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str | None:
        """The problem's code; None if the response is not a problem document."""
        code: str | None = self.json.get("code")
        return code

    @property
    def pointers(self) -> list[str]:
        """The place of each error in the problem document: a JSON pointer, a header or a parameter."""
        return [next(iter(error.values())) for error in self.json.get("errors", [])]


@dataclass(frozen=True, slots=True)
class Api:
    port: int
    settings: Settings
    client: Client
    stop: asyncio.Event

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        raw: bytes | None = None,
        key: str | None = None,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends a request with a `body` to be encoded as JSON, or a `raw` one. `token` is the API key."""
        request = self.client.request(method, self.url + path)
        if key is not None:
            request = request.header("Idempotency-Key", key)
        if token is not None:
            request = request.header("Authorization", f"Bearer {token}")
        content = raw if raw is not None else None if body is None else orjson.dumps(body)
        if content is not None:
            request = request.body_bytes(content)
            if "Content-Type" not in (headers or {}):
                request = request.header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            request = request.header(name, value)
        response = await request.build().send()
        received: dict[str, str] = {}
        for name, value in response.headers.items():  # a repeated header has one line per value
            received[name.lower()] = f"{received[name.lower()]}\n{value}" if name.lower() in received else value
        return Answer(response.status, received, bytes(await response.bytes()))

    async def post(self, key: str | None = "k-1", body: object = None, **named: Any) -> Answer:
        return await self.call("POST", "/v1/emails", key=key, body=EMAIL if body is None else body, **named)

    async def get(self, path: str, **named: Any) -> Answer:
        return await self.call("GET", path, **named)


def settings_of(database_url: str, amqp_url: str, topology: Topology, **more: str) -> Settings:
    """Settings for an API on any free port. The API needs no key until the first key exists."""
    environ = {
        "DATABASE_URL": database_url,
        "AMQP_URL": amqp_url,
        "EXCHANGE": topology.exchange,
        "QUEUE": topology.queue,
        "DLQ": topology.dlq,
        "API_ADDRESS": "127.0.0.1:0",
        "API_ALLOW_ANONYMOUS": "on",
        "DRAIN_SECONDS": "5",
        **more,
    }
    return load({f"DISPATCHER_{name}": value for name, value in environ.items()})


@asynccontextmanager
async def running(
    settings: Settings, *, lock_seconds: float = DEADLINE_SECONDS, fetch: Fetch | None = None
) -> AsyncIterator[Api]:
    """Runs an API during the block, with timeouts long enough for a busy machine. `fetch` asks Amazon SNS."""
    listener: socket.socket = listen(settings.api_address, setting="DISPATCHER_API_ADDRESS", shares_port=False)
    port: int = listener.getsockname()[1]
    stop = asyncio.Event()
    work = serve(settings, listener, stop, lock_seconds=lock_seconds, shutdown_seconds=DEADLINE_SECONDS, fetch=fetch)
    serving = asyncio.create_task(work)
    client = ClientBuilder().pool_max_idle_per_host(100).follow_redirects(False).build()
    try:
        async with client:
            api = Api(port, settings, client, stop)
            ready = asyncio.create_task(api.get("/healthz"))
            await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                ready.cancel()
                serving.result()
            await ready
            yield api
    finally:
        stop.set()
        with listener:
            await serving


def make_key(connection: psycopg.Connection, **columns: Any) -> str:
    """Inserts an API key and returns it. By default the key belongs to `shop`, may read, and may send from any
    address."""
    key = Secret.new()
    usual = {"tenant_id": "shop", "name": "test", "scopes": ["send", "read"]}
    row = {"key_id": key.key_id, "secret_hash": key.hashed(), **usual, **columns}
    names = sql.SQL(", ").join(map(sql.Identifier, row))
    places = sql.SQL(", ").join(map(sql.Placeholder, row))
    connection.execute(sql.SQL("insert into api_key ({}) values ({})").format(names, places), row)
    return key.text()
