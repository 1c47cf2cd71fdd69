"""Fixtures of the tests of provider events."""

from __future__ import annotations

from tests.events.scene import scene
from tests.relay.running import rabbit, settings, start

__all__ = ["rabbit", "scene", "settings", "start"]
