"""A separate host for each test, removed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.acceptance.harness import Host


@pytest.fixture
def host(tmp_path: Path, servers: Servers, database_url: str, topology: Topology) -> Iterator[Host]:
    """A host on the servers of the whole test run."""
    opened = Host(tmp_path, servers, database_url, topology)
    yield opened
    opened.destroy()
