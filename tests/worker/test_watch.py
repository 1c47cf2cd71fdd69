"""What a worker logs of its providers."""

from __future__ import annotations

from structlog.testing import capture_logs

from dispatcher.worker.watch import ProviderWatch
from tests.worker.stage_bench import FakeProviderStore


def test_a_provider_that_may_not_be_tried_is_logged_with_the_reason_and_the_seconds() -> None:
    with capture_logs() as logs:
        watch = ProviderWatch(FakeProviderStore())
        faulty, throttled = watch.new_breaker("smtp"), watch.new_breaker("ses")
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
