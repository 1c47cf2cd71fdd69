"""Creates OpenTelemetry spans for `tracing`. Spans wait in a bounded queue; a thread delivers them over OTLP/HTTP.

The SDK reads endpoint, headers, sampler, resource, queue size and batch size from its own variables (OTEL_…). A span
contains the email's id, and otherwise only data that log lines and metrics contain, too.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from dispatcher.telemetry.finished_attempt import FinishedAttempt
from dispatcher.version import VERSION

SERVICE: Final = "email-dispatcher"
# W3C Trace Context, section 3.2.2: an id of only zeros is invalid.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_NANOSECONDS: Final = 1_000_000_000


class OpenSpan:
    """The span of an enqueue in progress. `traceparent` is for the enqueued emails."""

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def note(self, emails: int, email_id: UUID | None) -> None:
        self._span.set_attribute("dispatcher.emails", emails)
        if email_id is not None:
            self._span.set_attribute("dispatcher.email_id", str(email_id))

    def end(self, error_type: str | None) -> None:
        """Ends the span now, with an error status if `error_type` is set."""
        _set_status(self._span, error_type)
        self._span.end()


class Spans:
    """Creates and delivers the spans of a process."""

    def __init__(self, instance: str) -> None:
        # Turn off the SDK's log. Otherwise, while the endpoint fails, the SDK would print an error on stderr for each
        # batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        self._exporter = _CountingExporter(OTLPSpanExporter())
        self._provider = TracerProvider(resource=_resource(instance), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(SERVICE, VERSION)

    def add_attempt(self, attempted: FinishedAttempt) -> None:
        span = self._tracer.start_span(
            "email.attempt",
            _context(attempted.traceparent),
            SpanKind.CLIENT,
            {
                "dispatcher.email_id": str(attempted.email_id),
                "dispatcher.attempt": attempted.attempt_number,
                "dispatcher.provider": attempted.provider,
                "dispatcher.outcome": attempted.outcome,
            },
            start_time=int(attempted.started_at * _NANOSECONDS),
        )
        _set_status(span, attempted.error_type)
        # If the clock was set back during the attempt, `finished_at` may be earlier than `started_at`.
        span.end(int(max(attempted.started_at, attempted.finished_at) * _NANOSECONDS))

    def begin_enqueue(self, traceparent: str | None) -> OpenSpan:
        return OpenSpan(self._tracer.start_span("email.enqueue", _context(traceparent), SpanKind.PRODUCER))

    def take_lost(self) -> int:
        """The number of spans lost since the last call."""
        return self._exporter.take_lost()

    def end(self, seconds: float) -> None:
        """Delivers the buffered spans within this many seconds. Spans that are not delivered by then are lost."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(seconds)


class _CountingExporter(SpanExporter):
    """Delivers spans, and counts lost ones. Does not log: only the main thread may, and deliveries run in another."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0
        self._reported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Cancels deliveries in progress."""
        self._exporter.shutdown()

    def take_lost(self) -> int:
        lost = self._lost
        new, self._reported = lost - self._reported, lost
        return new


def _resource(instance: str) -> Resource:
    """The service's name, version and process. OpenTelemetry's variables can set a different name."""
    ours = Resource({"service.version": VERSION, "service.instance.id": instance})
    configured = Resource.create()
    named = not str(configured.attributes.get("service.name", "unknown_service")).startswith("unknown_service")
    return ours.merge(configured) if named else ours.merge(configured).merge(Resource({"service.name": SERVICE}))


def _set_status(span: Span, error_type: str | None) -> None:
    if error_type is not None:
        span.set_attribute("error.type", error_type)
        span.set_status(Status(StatusCode.ERROR))


def _context(traceparent: str | None) -> Context:
    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None:
        return Context()
    trace_id, span_id, flags = (int(each, 16) for each in found.groups())
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(parent), Context())
