"""What the browser tests of one module share: a database, queues, API keys, and `dispatcher api` with its page."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from dispatcher.broker.topology import Topology, declare
from dispatcher.dev.servers import Servers
from tests.acceptance.harness import Host
from tests.api.running_api import make_key
from tests.store.books import Books


@dataclass(frozen=True, slots=True)
class Stage:
    """A host with a running API. `operator` is the key of an operator for all tenants, `captured` the Maildir that the
    page shows."""

    host: Host
    books: Books
    url: str
    operator: str
    captured: Path


@contextmanager
def staged(folder: Path, servers: Servers, template_database: str) -> Iterator[Stage]:
    name = f"browser_{secrets.token_hex(6)}"
    topology = Topology(exchange=name, queue=f"{name}.send", dlq=f"{name}.dlq", queue_type="quorum")
    host = Host(folder, servers, urlsplit(servers.database_url)._replace(path=f"/{name}").geturl(), topology)
    with ExitStack() as stack:
        administration = stack.enter_context(psycopg.connect(servers.database_url, autocommit=True))
        administration.execute(f"create database {name} template {template_database}".encode())
        stack.callback(administration.execute, f"drop database {name} with (force)".encode())
        stack.callback(host.destroy)
        asyncio.run(declare(servers.amqp_url, topology))
        connection = stack.enter_context(psycopg.connect(host.database_url, autocommit=True))
        operator = make_key(connection, scopes=["operate"], tenant_id=None, name="ann")
        host.sink()
        captured = folder / "captured"
        api = host.command("api", API_ADDRESS="127.0.0.1:0", OPS="on", PROVIDERS="smtp,capture", CAPTURE_DIR=captured)
        listener = api.await_events("api.started")["listener"]
        yield Stage(host, Books(connection), f"http://{listener}/ops", operator, captured)
