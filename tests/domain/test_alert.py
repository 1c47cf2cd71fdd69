"""Tests when the notices about an alert are sent: the first notice, reminders, and the resolution."""

from __future__ import annotations

import pytest

from dispatcher.domain.alert import Phase, next_phase


@pytest.mark.parametrize(
    ("is_firing", "notice_age_seconds", "phase"),
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
def test_the_phase_of_the_next_notice(is_firing: bool, notice_age_seconds: float | None, phase: Phase | None) -> None:
    assert next_phase(is_firing=is_firing, notice_age_seconds=notice_age_seconds, reminder_seconds=60) is phase
