"""Selects the event loop for the tests of `dispatcher/host`."""

from __future__ import annotations

from tests.providers.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
