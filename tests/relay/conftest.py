"""Fixtures of the relay's tests."""

from __future__ import annotations

from tests.broker.takers import start_taker
from tests.relay.running import rabbit, settings, start

__all__ = ["rabbit", "settings", "start", "start_taker"]
