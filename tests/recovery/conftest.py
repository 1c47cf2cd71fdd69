"""Fixtures of the recovery tests."""

from __future__ import annotations

from tests.relay.running import rabbit, settings, start

__all__ = ["rabbit", "settings", "start"]
