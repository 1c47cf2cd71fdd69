"""Fixtures: an SMTP door without TLS on the loopback, with a database of its own and without RabbitMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
import trustme

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from tests.api.running_api import UNREACHABLE_AMQP_URL, make_key, settings_of
from tests.smtp_door.running import Client, RunningDoor, running


@pytest.fixture
def database_url(tables_url: str) -> str:
    return tables_url


@pytest.fixture
def limits() -> dict[str, str]:
    """Settings that a test changes."""
    return {}


@pytest.fixture
def settings(servers: Servers, database_url: str, topology_names: Topology, limits: dict[str, str]) -> Settings:
    more = {"SUBMISSION_ADDRESS": "127.0.0.1:0", "SUBMISSION_HOST_NAME": "mx.example.com", **limits}
    return settings_of(database_url, UNREACHABLE_AMQP_URL, topology_names, **more)


@pytest.fixture
def token(connection: psycopg.Connection) -> str:
    """A key of the tenant `shop` that may send from example.com."""
    return make_key(connection, sender_domains=["example.com"], sender_addresses=[])


@pytest.fixture
async def door(token: str, settings: Settings) -> AsyncIterator[RunningDoor]:
    async with running(settings) as door:
        yield door


@pytest.fixture
async def client(door: RunningDoor, token: str) -> AsyncIterator[Client]:
    """A client that is logged in."""
    async with door.client() as client:
        await client.log_in(token)
        yield client


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path) -> Path:
    file = tmp_path / "submission.pem"
    file.write_bytes(authority.issue_cert("localhost").private_key_and_cert_chain_pem.bytes())
    return file
