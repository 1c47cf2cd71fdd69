"""Tests when spans are created, and what tracing costs while it is disabled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dispatcher.domain.email_id import new_email_id
from dispatcher.telemetry.finished_attempt import FinishedAttempt
from dispatcher.telemetry.spans import Spans
from dispatcher.telemetry.tracing import TRACER, is_wanted, prepare
from tests.telemetry.otlp import collecting

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
    ],
)
def test_the_standard_variables_decide(environ: dict[str, str], wanted: bool) -> None:
    assert is_wanted(environ) is wanted


def test_without_spans_no_library_is_loaded() -> None:
    code = (
        "import sys, dispatcher.worker.process; from dispatcher.supervisor import relay_process, monitor_process;"
        "from dispatcher.telemetry import tracing; tracing.prepare(); tracing.TRACER.begin('w0');"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", code], env={}, check=False).returncode == 0


def test_buffered_spans_are_delivered_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        spans = Spans("w0")
        spans.add_attempt(FinishedAttempt(None, 1.0, 2.0, new_email_id(), 1, "smtp", "accepted", None))

        spans.end(20)

    (span,) = collector.spans("email.attempt")
    assert (span.started_at, span.ended_at) == (1.0, 2.0)


def test_without_tracing_an_enqueue_keeps_its_callers_trace_context() -> None:
    with TRACER.enqueueing("00-1") as enqueueing:
        enqueueing.note(1)

    assert (TRACER.is_on, enqueueing.traceparent) == (False, "00-1")


@pytest.mark.parametrize(
    ("environ", "remedy"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "Set it to otlp"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf"),
    ],
)
def test_an_obstacle_is_logged_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], remedy: str
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)

    with capture_logs() as logs:
        prepare()

    assert [(log["event"], remedy in log["remedy"]) for log in logs] == [("tracing.unavailable", True)]


def test_missing_packages_are_logged_with_the_command_that_installs_them(tmp_path: Path) -> None:
    shadow = tmp_path / "opentelemetry.py"
    shadow.write_text("raise ModuleNotFoundError('No module named opentelemetry', name='opentelemetry')")
    code = (
        "from dispatcher.telemetry import log, tracing; log.configure('info', 'json'); tracing.prepare();"
        "tracing.TRACER.begin('w0'); assert not tracing.TRACER.is_on"
    )

    environ = {**ENDPOINT, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True)

    assert "pip install 'email-dispatcher[otel]'" in ended.stdout
    assert (ended.stdout.count("\n"), ended.stderr) == (1, "")
