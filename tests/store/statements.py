"""The named statements in the form that PostgreSQL's PREPARE accepts."""

from __future__ import annotations

import re

_NO_STATEMENT = re.compile(r"(listen|create|drop|set|grant|revoke|do)\b")


def prepared(name: str, text: str) -> bytes | None:
    """A statement with numbered parameters, in the order of first use; None if PREPARE does not accept its kind."""
    numbers: dict[str, str] = {}
    for parameter in re.findall(r"%\((\w+)\)[sb]", text):
        numbers.setdefault(parameter, f"${len(numbers) + 1}")
    if _NO_STATEMENT.match(text):
        return None
    numbered = re.sub(r"%\((\w+)\)[sb]", r"{\1}", text).format_map(numbers).replace("%%", "%")
    return f"prepare {name} as {numbered}".encode()
