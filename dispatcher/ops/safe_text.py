"""Makes a message's untrusted bytes and headers safe to print: terminal escape sequences lose their effect."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any


def safe_text(body: bytes, at_most: int) -> str:
    """Bytes as text that is safe to print: characters that are not printable are escaped.

    Args:
        at_most: The most bytes to show. If the message has more, the text ends with the number of bytes left out.
    """
    text = body[:at_most].decode("utf-8", "backslashreplace")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown if len(body) <= at_most else f"{shown}… ({len(body) - at_most:,} bytes more)"


def json_value(value: Any) -> Any:
    """An AMQP header's value, converted to JSON types."""
    if isinstance(value, Mapping):
        return {str(name): json_value(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [json_value(inner) for inner in value]
    if isinstance(value, bytes | bytearray):
        return safe_text(bytes(value), 1000)
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, datetime):  # pika returns UTC without a time zone
        return value.replace(tzinfo=value.tzinfo or UTC).isoformat()
    return value.isoformat() if isinstance(value, date) else safe_text(str(value).encode("utf-8", "replace"), 1000)
