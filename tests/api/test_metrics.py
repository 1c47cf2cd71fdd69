"""Tests the API's metrics: emails by outcome, refusals by problem code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dispatcher.config import Settings
from dispatcher.config.values import Listener
from dispatcher.telemetry import metric_files
from tests.abuse.raw_connection import exchange
from tests.api.running_api import EMAIL, Api, running
from tests.waiting import until


@pytest.fixture
def counted(settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    metric_files.begin(tmp_path, metric_files.API)
    try:
        yield replace(settings, metrics_dir=tmp_path, api_metrics_address=Listener("127.0.0.1", 0))
    finally:
        metric_files.end()
        while metric_files._files:  # a process keeps them until it exits; this one goes on
            metric_files._files.pop().close()


async def scraped(api: Api, listener: str) -> dict[str, float]:
    response = await api.client.get(f"http://{listener}/metrics").build().send()
    lines = (await response.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("dispatcher_api_"))
    return {name.removeprefix("dispatcher_api_"): float(value) for name, _, value in pairs}


async def test_emails_are_counted_by_outcome_and_refusals_by_code(counted: Settings) -> None:
    with capture_logs() as events:
        async with running(counted) as api:
            await until(lambda: any(event["event"] == "http.listening" for event in events))
            listener = next(event["listener"] for event in events if event["event"] == "http.listening")
            await api.post("k-1")
            await api.post("k-1")
            await api.post("k-1", EMAIL | {"subject": "Another"})
            await api.post(None)
            batch = {"emails": [EMAIL | {"message_key": "k-2"}, EMAIL | {"message_key": "k-3", "to": "nobody"}]}
            await api.call("POST", "/v1/emails/batch", body=batch)
            await api.get("/nowhere")
            await exchange(api.port, [b"no HTTP at all\r\n\r\n"])
            found = await scraped(api, listener)

    counts = {name: value for name, value in found.items() if "_total" in name}
    assert counts == {
        'emails_total{outcome="accepted"}': 2,
        'emails_total{outcome="known"}': 1,
        'refusals_total{reason="idempotency-key-reused"}': 1,
        'refusals_total{reason="idempotency-key-missing"}': 1,
        'refusals_total{reason="invalid-email"}': 1,
        'refusals_total{reason="not-found"}': 1,
        'refusals_total{reason="malformed-request"}': 1,
    }
    assert found['insert_batch_emails_bucket{le="+Inf"}'] == found['insert_seconds_bucket{le="+Inf"}'] == 4
