"""An OTLP/HTTP server that records the spans that it receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.monitor.receiver import serving


@dataclass(frozen=True, slots=True)
class SeenSpan:
    name: str
    trace: str
    span: str
    parent: str
    kind: int
    started_at: float
    ended_at: float
    failed: bool
    attributes: dict[str, str | int]
    service: str


@dataclass
class Collector:
    url: str
    bodies: list[bytes] = field(default_factory=list)

    def spans(self, name: str) -> list[SeenSpan]:
        found = [span for body in self.bodies for span in _read(body) if span.name == name]
        return sorted(found, key=lambda span: span.started_at)


def _read(body: bytes) -> Iterator[SeenSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    for group in request.resource_spans:
        about = {each.key: each.value.string_value for each in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield SeenSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.kind,
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    {each.key: each.value.string_value or each.value.int_value for each in span.attributes},
                    about["service.name"],
                )


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Suppresses the server's log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, serving(server, threading.Event()):
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients may disconnect
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        yield collector
