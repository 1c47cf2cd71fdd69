"""What tests of the monitor share: its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the monitor runs on."""
    return {"uvloop": uvloop.new_event_loop}
