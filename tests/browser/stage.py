"""What the browser tests of one module share: a database, queues, API keys, and `dispatcher api` with its page."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import Servers
from tests.acceptance.harness import Host
from tests.api.running_api import make_key
from tests.supervisor.program import Program


@dataclass(slots=True)
class Stage:
    """A running API, and what belongs to it.

    Attributes:
        host: The host; it may run `dispatcher run`, too.
        api: The process of the API.
        url: The address of the operators' page.
        operator: The API key of an operator for all tenants.
        captured: The Maildir that the page of captured emails shows.
    """

    host: Host
    api: Program
    url: str
    operator: str
    captured: Path

    def key(self, **columns: object) -> str:
        """A new API key."""
        with psycopg.connect(self.host.database_url) as connection:
            return make_key(connection, **columns)

    def execute(self, statement: str, *arguments: object) -> list[tuple[object, ...]]:
        """Executes a statement in the database."""
        with psycopg.connect(self.host.database_url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), arguments or None)
            return cursor.fetchall() if cursor.description else []


@contextmanager
def staged(folder: Path, servers: Servers, template_database: str, **settings: object) -> Iterator[Stage]:
    """A stage with an empty database.

    Args:
        settings: Further settings of the API, without the prefix DISPATCHER_.
    """
    name = f"browser_{secrets.token_hex(6)}"
    database_url = urlunsplit(urlsplit(servers.database_url)._replace(path=f"/{name}"))
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq", queue_type="quorum")
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        clone = sql.SQL("create database {} template {}").format(*map(sql.Identifier, (name, template_database)))
        administration.execute(clone)
        asyncio.run(declare(servers.amqp_url, topology))
        host = Host(folder, servers, database_url, topology)
        try:
            yield _started(host, settings)
        finally:
            host.destroy()
            administration.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def _started(host: Host, settings: dict[str, object]) -> Stage:
    with closing(psycopg.connect(host.database_url, autocommit=True)) as connection:
        operator = make_key(connection, scopes=["operate"], tenant_id=None, name="ann")
    host.sink()
    captured = host.folder / "captured"
    usual: dict[str, Any] = {"API_ADDRESS": "127.0.0.1:0", "OPS": "on", "PROVIDERS": "smtp,capture"}
    api = host.command("api", **{**usual, "CAPTURE_DIR": captured, **settings})
    listener = api.await_events("api.started")["listener"]
    return Stage(host, api, f"http://{listener}/ops", operator, captured)
