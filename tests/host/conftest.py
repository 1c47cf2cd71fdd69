"""The event loop for tests of host/."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Uses the event loop of the product."""
    return {"uvloop": uvloop.new_event_loop}
