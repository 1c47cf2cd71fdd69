"""OpenTelemetry's side of `tracing`: spans in a bounded queue, delivered by a thread over OTLP/HTTP.

Endpoint, headers, sampler, resource, queue and batch sizes are the SDK's business, by its own variables (OTEL_…).
A span names the email by its id, and says nothing that a metric or a log line does not say.
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

from dispatcher.telemetry.attempted import Attempted
from dispatcher.version import VERSION

SERVICE: Final = "email-dispatcher"
# W3C Trace Context, section 3.2.2: ids of zeros alone are none.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_NANOSECONDS: Final = 1_000_000_000


class OpenSpan:
    """The span of an enqueue that is under way.

    Attributes:
        traceparent: Its own trace context, for what it causes.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def note(self, emails: int, email_id: UUID | None) -> None:
        """What it was about."""
        self._span.set_attribute("dispatcher.emails", emails)
        if email_id is not None:
            self._span.set_attribute("dispatcher.email_id", str(email_id))

    def end(self, error_type: str | None) -> None:
        """It ended now, well where there is no error."""
        _judge(self._span, error_type)
        self._span.end()


class Spans:
    """Makes spans, and delivers them."""

    def __init__(self, instance: str) -> None:
        # What it has to say of its endpoint would come on stderr, once per batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        self._exporter = _Counting(OTLPSpanExporter())
        self._provider = TracerProvider(resource=_resource(instance), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(SERVICE, VERSION)

    def add_attempt(self, attempted: Attempted) -> None:
        """The span of an attempt, from its beginning to its end."""
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
        _judge(span, attempted.error_type)
        # A wall clock may have been set back meanwhile.
        span.end(int(max(attempted.started_at, attempted.finished_at) * _NANOSECONDS))

    def begin_enqueue(self, traceparent: str | None) -> OpenSpan:
        """A span that begins now."""
        return OpenSpan(self._tracer.start_span("email.enqueue", _context(traceparent), SpanKind.PRODUCER))

    def take_lost(self) -> int:
        """How many spans nobody took since the last call."""
        return self._exporter.take_lost()

    def end(self, seconds: float) -> None:
        """Delivers what waits, as long as this takes no longer; what a server does not take then is lost."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(seconds)


class _Counting(SpanExporter):
    """Counts what could not be delivered; the thread that delivers writes no log, which belongs to the loop's."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0
        self._told = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Delivers a batch."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Gives up what is under way."""
        self._exporter.shutdown()

    def take_lost(self) -> int:
        """See `Spans.take_lost`; for one thread."""
        lost = self._lost
        new, self._told = lost - self._told, lost
        return new


def _resource(instance: str) -> Resource:
    """Who we are, unless OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say otherwise."""
    ours = Resource({"service.version": VERSION, "service.instance.id": instance})
    told = Resource.create()
    named = not str(told.attributes.get("service.name", "unknown_service")).startswith("unknown_service")
    return ours.merge(told) if named else ours.merge(told).merge(Resource({"service.name": SERVICE}))


def _judge(span: Span, error_type: str | None) -> None:
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
