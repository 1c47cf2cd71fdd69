"""When an alert is told, again, or over."""

from __future__ import annotations

import pytest

from dispatcher.domain.alert import Phase, next_phase


@pytest.mark.parametrize(
    ("stands", "told_age_seconds", "phase"),
    [
        (False, None, None),
        (True, None, Phase.RAISED),
        (True, 0.0, None),
        (True, 59.9, None),
        (True, 60.0, Phase.REMINDED),
        (False, 0.0, Phase.RESOLVED),
        (False, 600.0, Phase.RESOLVED),
    ],
)
def test_the_next_thing_to_tell(stands: bool, told_age_seconds: float | None, phase: Phase | None) -> None:
    assert next_phase(stands=stands, told_age_seconds=told_age_seconds, reminder_seconds=60) is phase
