"""Logs events as JSON lines, or as coloured text on a terminal."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, BinaryIO, Final, TextIO, cast

import orjson
import structlog
from structlog.typing import EventDict, FilteringBoundLogger

from dispatcher.telemetry import quick_log
from dispatcher.telemetry.log_writer import LogWriter
from dispatcher.telemetry.storms import StormLimit

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def get_log() -> FilteringBoundLogger:
    """The logger. Call it with the name of an event from `telemetry.events`: `log.info("noun.verb_past", field=…)`."""
    log: FilteringBoundLogger = structlog.get_logger()
    return log


def configure(level: str, form: str, stream: TextIO = sys.stdout, **always: Any) -> None:
    """Sets up the log of this process. A second call replaces the first call's log.

    `form` is `json`, `text`, or `auto`: text on a terminal, otherwise JSON. Every event has the fields `always`.
    """
    terminal = stream.isatty()
    as_json = form == "json" or (form == "auto" and not terminal)
    lines = LogWriter(stream)
    structlog.reset_defaults()
    structlog.configure(
        processors=[
            StormLimit(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            lines.add_dropped_count,
            *(
                [structlog.processors.EventRenamer("event"), structlog.processors.JSONRenderer(serializer=_dump)]
                if as_json
                else [structlog.dev.ConsoleRenderer(colors=terminal and "NO_COLOR" not in os.environ, pad_event_to=24)]
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.BytesLoggerFactory(cast(BinaryIO, lines))
        if as_json
        else lambda *_: _TextLogger(lines),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**always)
    quick_log.log.write_to(lines if as_json and _LEVELS[level] <= logging.INFO else None, always)
    # These libraries also raise their errors as exceptions, so their log lines are not needed. The lines could contain
    # addresses and hosts.
    for name in ("pika", "aiosmtplib", "asyncio", "psycopg", "psycopg.pool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


class _TextLogger:
    def __init__(self, lines: LogWriter) -> None:
        self._lines = lines

    def msg(self, message: str) -> None:
        """Writes one event, which has several lines if it includes a traceback."""
        self._lines.write(message.encode("utf-8", "replace") + b"\n")

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


def _dump(event: EventDict, **_: Any) -> bytes:
    return orjson.dumps(event, default=str)
