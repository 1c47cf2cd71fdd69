from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dispatcher.store.connections import make_pool
from dispatcher.store.leases import LeaseStore
from tests.recovery.lost_workers import SLOT, WORKER, Host
from tests.relay.running import relay, settings, start
from tests.store.books import Books

__all__ = ["relay", "settings", "start"]


@pytest.fixture
async def host(tables_url: str, tmp_path: Path, books: Books) -> AsyncIterator[Host]:
    async with make_pool(tables_url, name=WORKER, size=2) as pool:
        yield Host(tables_url, tmp_path / "run", books, LeaseStore(pool, worker=WORKER, slot=SLOT))
