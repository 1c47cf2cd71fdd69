"""Fixtures of the tests of provider events."""

from __future__ import annotations

import pytest

from dispatcher.domain.suppression import SuppressionRules
from dispatcher.events.intake import EventIntake
from dispatcher.store.connections import Pool
from tests.relay.running import rabbit, settings, start

__all__ = ["rabbit", "settings", "start"]


@pytest.fixture
def intake(pool: Pool) -> EventIntake:
    """Stores events in `tables_url`."""
    return EventIntake(pool, SuppressionRules())
