"""A separate host for each test, and providers to which it sends, removed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.acceptance.harness import Double, Host
from tests.monitor.receiver import Receiver, receiving


@pytest.fixture
def host(tmp_path: Path, servers: Servers, database_url: str, topology: Topology) -> Iterator[Host]:
    opened = Host(tmp_path, servers, database_url, topology)
    yield opened
    opened.destroy()


@pytest.fixture
def double(tmp_path: Path, host: Host) -> Iterator[Double]:
    host.recipient = made = Double(tmp_path / "double")
    yield made
    made.kill()


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def receiver(ca: trustme.CA) -> Iterator[Receiver]:
    with receiving(ca, "127.0.0.1") as running:
        yield running
