"""Fixtures of the tests of provider events."""

from __future__ import annotations

from tests.events.scene import scene
from tests.monitor.receiver import ca, receiver
from tests.relay.running import settings, start

__all__ = ["ca", "receiver", "scene", "settings", "start"]
