from __future__ import annotations

from tests.broker.takers import start_taker
from tests.relay.running import relay, settings, start

__all__ = ["relay", "settings", "start", "start_taker"]
