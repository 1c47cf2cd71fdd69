"""Spans for OpenTelemetry, if OpenTelemetry's standard variables enable them and the extra `otel` is installed.

    prepare   in the parent, before it forks     logs what is missing, and loads the libraries for all processes
    begin     in each process, after its fork    sets `TRACER.is_on`; without tracing, checking `is_on` is the only cost
    end       when the process stops             delivers buffered spans, for a second at most

`spans` imports OpenTelemetry's libraries. If a library fails, spans may be lost, but sending is not affected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self
from uuid import UUID

from dispatcher.telemetry.finished_attempt import FinishedAttempt
from dispatcher.telemetry.log import get_log

if TYPE_CHECKING:
    from dispatcher.telemetry.spans import OpenSpan, Spans

END_SECONDS: Final = 1.0
REMEDY: Final = "Install them: pip install 'email-dispatcher[otel]'"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OUR_PROTOCOL: Final = "http/protobuf"


class EnqueueSpan:
    """A context manager for the enqueue of one request, which does nothing if tracing is off. `traceparent` is then the
    caller's trace context."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, traceparent: str | None, span: OpenSpan | None = None) -> None:
        self.traceparent = span.traceparent if span else traceparent
        self._span = span

    def note(self, emails: int, email_id: UUID | None = None) -> None:
        if self._span:
            self._span.note(emails, email_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._span:
            self._span.end(None if error is None else str(getattr(error, "code", type(error).__name__)))


class Tracer:
    """Creates the spans of this process, if tracing `is_on`."""

    __slots__ = ("_spans", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        self._spans: Spans | None = None

    def begin(self, instance: str) -> None:
        """Turns tracing on if it is enabled and possible. Starts a thread, so call it after the last fork."""
        if not is_wanted(os.environ) or _obstacle(os.environ):
            return
        from dispatcher.telemetry.spans import Spans

        try:
            self._spans = Spans(instance)
        except Exception as error:  # noqa: BLE001 - a wrong variable must not stop sending
            get_log().warning("tracing.unavailable", reason=f"{type(error).__name__}: {error}")
        else:
            self.is_on = True

    def add_attempt(self, attempted: FinishedAttempt) -> None:
        """Creates the span of a finished attempt. Check `is_on` first, because that is cheaper."""
        if self._spans is None:
            return
        try:
            self._spans.add_attempt(attempted)
            if lost := self._spans.take_lost():
                get_log().warning("tracing.spans_dropped", spans=lost)
        except Exception as error:  # noqa: BLE001 - an error of tracing must not affect the email
            self._give_up(error)

    def enqueueing(self, traceparent: str | None) -> EnqueueSpan:
        """The span of an enqueue that begins now. The caller's `traceparent` is not validated."""
        if self._spans is None:
            return EnqueueSpan(traceparent)
        try:
            return EnqueueSpan(traceparent, self._spans.begin_enqueue(traceparent))
        except Exception as error:  # noqa: BLE001 - an error of tracing must not affect the enqueue
            self._give_up(error)
            return EnqueueSpan(traceparent)

    def end(self) -> None:
        """Delivers buffered spans, for `END_SECONDS` at most."""
        if self._spans is not None:
            self._spans.end(END_SECONDS)
            if lost := self._spans.take_lost():
                get_log().warning("tracing.spans_dropped", spans=lost)
        self._spans, self.is_on = None, False

    def _give_up(self, error: Exception) -> None:
        self._spans, self.is_on = None, False
        get_log().error("error.unexpected", where="tracing", error=type(error).__name__)


TRACER: Final = Tracer()


def prepare() -> None:
    """If spans are enabled, loads OpenTelemetry's libraries, or logs what is missing. Starts no thread."""
    if is_wanted(os.environ) and (obstacle := _obstacle(os.environ)):
        get_log().warning("tracing.unavailable", reason=obstacle[0], remedy=obstacle[1])


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables enable spans."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    return bool(exporter or any(environ.get(name) for name in _ENDPOINTS))


def _obstacle(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Why spans cannot be created, and the remedy; None if nothing is missing."""
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").lower().split(",")
    if "otlp" not in map(str.strip, exporters) and exporters != [""]:
        return "OTEL_TRACES_EXPORTER lists no supported exporter.", "Set it to otlp or none."
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _OUR_PROTOCOL)
    if protocol != _OUR_PROTOCOL:
        return (
            f"Spans can be delivered only over {_OUR_PROTOCOL}.",
            f"Set OTEL_EXPORTER_OTLP_PROTOCOL to {_OUR_PROTOCOL}.",
        )
    try:
        import dispatcher.telemetry.spans  # noqa: F401
    except ModuleNotFoundError as error:
        return f"Spans need packages that are not installed ({error.name}).", REMEDY
    return None
