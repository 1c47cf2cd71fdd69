"""Selects the event loop for the tests of `dispatcher/host`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs the tests in the dispatcher's event loop."""
    return {"uvloop": uvloop.new_event_loop}
