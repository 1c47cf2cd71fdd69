"""What strangers put into a message, bytes and headers, in a form that a terminal shows and nothing obeys."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any


def safe_text(body: bytes, at_most: int) -> str:
    """Bytes as text that a terminal shows and nothing obeys: whatever does not print is escaped."""
    text = body[:at_most].decode("utf-8", "backslashreplace")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(body) <= at_most else f"{shown}… ({len(body) - at_most:,} octets more)"


def plain(value: Any) -> Any:
    """An AMQP header's value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, bytes | bytearray):
        return safe_text(bytes(value), 1000)
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, datetime):  # pika's are UTC and do not say so
        return value.replace(tzinfo=value.tzinfo or UTC).isoformat()
    return value.isoformat() if isinstance(value, date) else safe_text(str(value).encode("utf-8", "replace"), 1000)
