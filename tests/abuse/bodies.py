"""Bodies that are expensive to parse."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import orjson

from tests.abuse.case import Case, Target
from tests.abuse.raw_connection import JSON, exchange, head, post
from tests.api.running_api import EMAIL

MIB: Final = 1 << 20
FILE: Final = {"filename": "a.pdf", "content_type": "application/pdf", "content": "JVBERg=="}
MALFORMED: Final = frozenset({"400 malformed-json"})
UNFRAMED: Final = frozenset({"400 malformed-request"})
INVALID: Final = frozenset({"422 invalid-email"})
TOO_LARGE: Final = frozenset({"413 body-too-large"})
BUSY: Final = frozenset({"503 overloaded"})
MOST: Final = 39 * MIB
"""Bytes; just below the size of the largest body that the API reads."""
PARSING_MS: Final = 500.0
"""While orjson parses a body, the event loop waits for the GIL (decision 0087)."""


def email(**fields: Any) -> bytes:
    return orjson.dumps(EMAIL | fields)


def text(content: bytes) -> bytes:
    """An email whose text is `content`, which must already be escaped for JSON."""
    return b'{"from":"shop@example.com","to":"ann@example.org","subject":"a","text":"' + content + b'"}'


def data(content: bytes) -> bytes:
    """An email with the JSON value `content` in its template data."""
    start = b'{"from":"shop@example.com","to":"ann@example.org","template_id":"t","template_data":{"a":'
    return start + content + b"}}"


# The bodies are functions, so that only an attacking process builds them.
TEXTS: Final[dict[str, tuple[Callable[[], bytes], frozenset[str]]]] = {
    "empty objects": (lambda: b"[" + b"{}," * (MOST // 3) + b"{}]", TOO_LARGE),
    "as many values as are allowed": (lambda: data(b"[" + b"{}," * 190_000 + b"{}]"), INVALID),
    "an endless number": (lambda: data(b"1" * MOST), MALFORMED),
    "a list in a list, a million times": (lambda: b"[" * MIB, TOO_LARGE | MALFORMED),
    "200,000 names, one of them twice": (
        lambda: data(b"{" + b",".join(b'"a%d":1' % number for number in range(199_000)) + b',"a0":1}'),
        MALFORMED,
    ),
    "strings that look like names": (lambda: text(rb"\"a\":" * (6 * MIB)), INVALID),
    "escapes": (lambda: text(rb"\u0041" * (MOST // 6)), INVALID | {"202"}),
    "one non-ASCII character": (lambda: text(b"a" * (MOST - 200) + "\U0001f4e7".encode()), INVALID),
    "an unterminated string": (lambda: b'"' + b"a" * MOST, MALFORMED),
    "quotes that are escaped": (lambda: b"[" * 400_001 + b'"' + rb"\"" * (MOST // 2 - 200_002), TOO_LARGE),
    "spaces": (lambda: b" " * MOST, MALFORMED),
    "a line without an end": (lambda: text(b"a" * (9 * MIB)), INVALID | {"202"}),
    "an address of 1 MB": (lambda: email(to="a" * MIB + "@example.org"), INVALID),
    "100,000 headers": (lambda: email(headers={f"X-{n}": "" for n in range(100_000)}), INVALID),
    "100,000 attachments": (lambda: email(attachments=[FILE] * 100_000), INVALID | TOO_LARGE),
    "base64 that fails at its end": (
        lambda: email(attachments=[FILE | {"content": "QUJD" * (8 * MIB)}])[:-5] + b'%"}]}',
        INVALID | MALFORMED,
    ),
}
BATCHES: Final[dict[str, tuple[Callable[[], bytes], frozenset[str]]]] = {
    "1,000 emails of unknown fields": (
        lambda: orjson.dumps({"emails": [EMAIL | {"x" * 200 + str(n): 1 for n in range(30)}] * 1000}),
        frozenset({"200"}),
    ),
    "a million values that are not emails": (lambda: b'{"emails":[' + b"1," * MIB + b"1]}", TOO_LARGE),
}


async def _sent(path: str, make: Callable[[], bytes], target: Target) -> list[str]:
    return [await exchange(target.port, [post(path, make(), *target.named())])]


async def _in_chunks(piece: bytes, target: Target) -> list[str]:
    start = head("POST /v1/emails", *target.named(), JSON, "Transfer-Encoding: chunked")
    return [await exchange(target.port, [start + piece * (MIB // len(piece)) + b"0\r\n\r\n"])]


async def _in_chunks_without_key(piece: bytes, target: Target) -> list[str]:
    start = head("POST /v1/emails", JSON, "Transfer-Encoding: chunked")
    return [await exchange(target.port, [start + piece * (4 * MIB // len(piece))])]


CASES: Final = (
    *(
        Case(family, name, partial(_sent, path, cache(make)), allowed | BUSY, max_health_ms=PARSING_MS)
        for family, path, cases in (("body", "/v1/emails", TEXTS), ("batch", "/v1/emails/batch", BATCHES))
        for name, (make, allowed) in cases.items()
    ),
    Case("pieces", "of one octet", partial(_in_chunks, b"1\r\n \r\n"), UNFRAMED),
    Case("pieces", "with extensions", partial(_in_chunks, b"1;" + b"x" * 4000 + b"\r\n \r\n"), MALFORMED),
    Case("pieces", "without a key", partial(_in_chunks_without_key, b"1\r\n \r\n"), UNFRAMED | {"401 unauthorized"}),
)
