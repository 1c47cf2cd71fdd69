"""A collector receives the spans of real processes."""

from __future__ import annotations

import signal
import time
from typing import Any

import orjson
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.acceptance.canary import request
from tests.acceptance.harness import Host, stop
from tests.supervisor.program import eventually
from tests.telemetry.otlp import collecting

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


def test_the_callers_span_enqueue_and_attempts_form_one_trace(host: Host) -> None:
    host.sink()
    document = {"from": "shop@example.com", "to": "greylisted@example.org", "subject": "Receipt", "text": "Thank you."}
    with collecting() as collector:
        settings: dict[str, Any] = {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        run = host.run(WORKERS=1, **settings)
        api = host.command("api", API_ADDRESS="127.0.0.1:0", API_ALLOW_ANONYMOUS="on", **settings)
        listener = api.await_events("api.started")["listener"]
        began_at = time.time()
        for body in (orjson.dumps(document), b"{"):
            request(listener, "POST", "/v1/emails", body, Idempotency_Key="receipt-1", traceparent=TRACEPARENT)
        # At exit, a process has one second to export, which may be too short on a busy machine. So wait until all spans
        # are exported.
        eventually(lambda: len(collector.spans("email.enqueue") + collector.spans("email.attempt")) == 4, "all spans")
        api.send(signal.SIGTERM)
        assert api.await_exit() == 0
        stop(run)

        accepted, refused = collector.spans("email.enqueue")
        first, second = collector.spans("email.attempt")
    (email_id,) = host.rows()
    expected = {"dispatcher.email_id": str(email_id)}
    assert (accepted.trace, accepted.parent, accepted.kind) == (TRACE, CALLER, Span.SPAN_KIND_PRODUCER)
    assert accepted.attributes == expected | {"dispatcher.emails": 1}
    assert (refused.parent, refused.failed, refused.attributes) == (CALLER, True, {"error.type": "malformed-json"})
    for attempt in (first, second):
        assert (attempt.trace, attempt.parent, attempt.kind) == (TRACE, accepted.span, Span.SPAN_KIND_CLIENT)
        assert attempt.service == "email-dispatcher"
    expected["dispatcher.provider"] = "smtp"
    deferral = {"dispatcher.outcome": "deferred", "error.type": "recipient_deferred"}
    assert first.attributes == expected | deferral | {"dispatcher.attempt": 1}
    assert second.attributes == expected | {"dispatcher.outcome": "accepted", "dispatcher.attempt": 2}
    assert (first.failed, second.failed) == (True, False)
    assert began_at <= first.started_at <= first.ended_at <= second.started_at <= second.ended_at <= time.time()
