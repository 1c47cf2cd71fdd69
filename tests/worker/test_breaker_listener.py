"""Tests what a worker logs about its providers."""

from __future__ import annotations

from structlog.testing import capture_logs

from dispatcher.worker.breaker_listener import BreakerListener
from tests.worker.stage_bench import FakeProviderStore


def test_a_paused_provider_is_logged_with_reason_and_seconds() -> None:
    with capture_logs() as logs:
        listener = BreakerListener(FakeProviderStore())
        faulty, throttled = listener.new_breaker("smtp"), listener.new_breaker("ses")
        faulty.open(faulty.begin(), "bad credentials")
        throttled.pause(throttled.begin(), 90.0, "throttled")

    fault, throttling = logs
    assert {**fault, "seconds": None} == {
        "event": "provider.paused",
        "log_level": "error",
        "provider": "smtp",
        "state": "open",
        "reason": "bad credentials",
        "seconds": None,
    }
    assert (throttling["log_level"], throttling["provider"], throttling["seconds"]) == ("warning", "ses", 90.0)
