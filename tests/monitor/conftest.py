"""Fixtures of the monitor tests: the event loop, a second RabbitMQ client, and a receiver of notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
import uvloop

from dispatcher.domain.alert import Alert, Kind, Notice, Phase
from tests.monitor.receiver import ca, receiver, write_ca

__all__ = ["ca", "receiver"]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs the tests in the monitor's event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> Path:
    return write_ca(ca, tmp_path)


@pytest.fixture
def notice() -> Notice:
    at = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
    alert = Alert(
        Kind.DEAD_LETTERS,
        True,
        "email.dispatcher.dlq",
        at,
        "host-1",
        count=3,
        oldest_age_seconds=61.25,
        correlation_ids=("order-1", "order-2"),
    )
    return Notice("alert_1", Phase.RAISED, at, alert)
