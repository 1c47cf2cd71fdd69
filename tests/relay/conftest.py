"""Fixtures of the relay's tests."""

from __future__ import annotations

from tests.broker.takers import start_taker
from tests.relay.running import rabbit, relay, settings, start

__all__ = ["rabbit", "relay", "settings", "start", "start_taker"]
