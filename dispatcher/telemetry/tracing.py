"""Spans for OpenTelemetry, where the environment asks for them by its standard variables and the extra `otel` is there.

    prepare   the parent, before it forks   says what is missing, and loads the libraries for all processes
    begin     each process, after its fork  from here on `TRACER.is_on`, which is all that tracing costs where it is off
    end       as the process stops          what waits is delivered, for a second at most

`spans` has the libraries. Nothing that goes wrong with them reaches whoever sends: it ends in spans that are missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self
from uuid import UUID

from dispatcher.telemetry.attempted import Attempted
from dispatcher.telemetry.log import get_log

if TYPE_CHECKING:
    from dispatcher.telemetry.spans import OpenSpan, Spans

END_SECONDS: Final = 1.0
REMEDY: Final = "Install them: pip install 'email-dispatcher[otel]'"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OUR_PROTOCOL: Final = "http/protobuf"


class Enqueueing:
    """One request's enqueue, for a `with` block; nothing where tracing is off.

    Attributes:
        traceparent: What its emails carry: the span's own trace context, or the caller's where there is no span.
    """

    __slots__ = ("_span", "traceparent")

    def __init__(self, traceparent: str | None, span: OpenSpan | None = None) -> None:
        self.traceparent = span.traceparent if span else traceparent
        self._span = span

    def note(self, emails: int, email_id: UUID | None = None) -> None:
        """How many emails it was about, and which one where it was one."""
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
    """This process's spans.

    Attributes:
        is_on: Whether there are any.
    """

    __slots__ = ("_spans", "is_on")

    def __init__(self) -> None:
        self.is_on = False
        self._spans: Spans | None = None

    def begin(self, instance: str) -> None:
        """Makes spans from now on, if they are wanted and can be had: starts a thread, so only after the last fork.

        Args:
            instance: Who this is among the host's processes.
        """
        if not is_wanted(os.environ) or _obstacle(os.environ):
            return
        from dispatcher.telemetry.spans import Spans

        try:
            self._spans = Spans(instance)
        except Exception as error:  # noqa: BLE001 - whatever a variable makes of it, emails are sent
            get_log().warning("tracing.unavailable", reason=f"{type(error).__name__}: {error}")
        else:
            self.is_on = True

    def add_attempt(self, attempted: Attempted) -> None:
        """Makes the span of an attempt. Ask `is_on` first."""
        if self._spans is None:
            return
        try:
            self._spans.add_attempt(attempted)
            if lost := self._spans.take_lost():
                get_log().warning("tracing.spans_dropped", spans=lost)
        except Exception as error:  # noqa: BLE001 - a fault in here must not be the email's
            self._give_up(error)

    def enqueueing(self, traceparent: str | None) -> Enqueueing:
        """The enqueue of a request that begins now.

        Args:
            traceparent: The caller's, unchecked.
        """
        if self._spans is None:
            return Enqueueing(traceparent)
        try:
            return Enqueueing(traceparent, self._spans.begin_enqueue(traceparent))
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return Enqueueing(traceparent)

    def end(self) -> None:
        """Delivers what waits, for `END_SECONDS` at most; without tracing, does nothing."""
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
    """Says in the log what keeps spans that are wanted from being made; starts no thread."""
    if is_wanted(os.environ) and (obstacle := _obstacle(os.environ)):
        get_log().warning("tracing.unavailable", reason=obstacle[0], remedy=obstacle[1])


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for spans."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    return bool(exporter or any(environ.get(name) for name in _ENDPOINTS))


def _obstacle(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Why spans that are wanted cannot be made, and what to do about it."""
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").lower().split(",")
    if "otlp" not in map(str.strip, exporters) and exporters != [""]:
        return "OTEL_TRACES_EXPORTER names no exporter that we have.", "Set it to otlp, or to none."
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _OUR_PROTOCOL)
    if protocol != _OUR_PROTOCOL:
        return f"Spans are delivered by {_OUR_PROTOCOL} alone.", f"Set OTEL_EXPORTER_OTLP_PROTOCOL to {_OUR_PROTOCOL}."
    try:
        import dispatcher.telemetry.spans  # noqa: F401
    except ModuleNotFoundError as error:
        return f"Spans need packages that are not installed ({error.name}).", REMEDY
    return None
