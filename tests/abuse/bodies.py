"""Bodies that are expensive to parse, and emails with hostile content."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import orjson

from tests.abuse.case import Case, Target
from tests.abuse.raw_connection import JSON, exchange, head, post

MIB: Final = 1 << 20
EMAIL: Final[dict[str, Any]] = {
    "from": "shop@example.com",
    "to": ["ann@example.org"],
    "subject": "Your receipt",
    "text": "Thank you.",
}
FILE: Final = {"filename": "a.pdf", "content_type": "application/pdf", "content": "JVBERg=="}
MALFORMED: Final = frozenset({"400 malformed-json"})
INVALID: Final = frozenset({"422 invalid-email"})
NOT_ALLOWED: Final = frozenset({"422 email-not-allowed"})
TOO_LARGE: Final = frozenset({"413 body-too-large"})
BUSY: Final = frozenset({"503 overloaded"})
MOST: Final = 39 * MIB
"""Bytes; just below the size of the largest body that the API reads."""


def email(**fields: Any) -> bytes:
    """A valid email as JSON, with the given fields changed."""
    return orjson.dumps(EMAIL | fields)


def text(content: bytes) -> bytes:
    """An email whose text is `content`, which must already be escaped for JSON."""
    return b'{"from":"shop@example.com","to":"ann@example.org","subject":"a","text":"' + content + b'"}'


def data(content: bytes) -> bytes:
    """An email with the JSON value `content` in its template data."""
    start = b'{"from":"shop@example.com","to":"ann@example.org","template_id":"t","template_data":{"a":'
    return start + content + b"}}"


def attached(size: int, **fields: Any) -> bytes:
    """An email with an attachment of about `size` bytes."""
    return email(attachments=[FILE | {"content": "QUJD" * (size // 3)} | fields])


# The bodies are functions, so that only an attacking process builds them.
TEXTS: Final[dict[str, tuple[Callable[[], bytes], frozenset[str]]]] = {
    "empty objects": (lambda: b"[" + b"{}," * (MOST // 3) + b"{}]", TOO_LARGE),
    "empty lists in an email": (lambda: data(b"[" + b"[]," * (MOST // 3) + b"[]]"), TOO_LARGE),
    "as many values as are allowed": (lambda: b"[" + b"{}," * 199_000 + b"{}]", INVALID),
    "as many values as are allowed, in an email": (lambda: data(b"[" + b"{}," * 190_000 + b"{}]"), INVALID | {"202"}),
    "an endless number": (lambda: data(b"1" * MOST), MALFORMED),
    "numbers of many digits": (lambda: data(b"[" + b"9" * 4000 + b"]"), MALFORMED | INVALID | {"202"}),
    "fractions of many digits": (lambda: data(b"0." + b"3" * MIB), MALFORMED | INVALID | {"202"}),
    "a number out of range": (lambda: data(b"1e999999999"), MALFORMED | INVALID | {"202"}),
    "not a number": (lambda: data(b"NaN"), MALFORMED),
    "a list in a list, a million times": (lambda: b"[" * MIB, TOO_LARGE | MALFORMED),
    "an object in an object, 1,000 times": (lambda: data(b'{"a":' * 1000 + b"1" + b"}" * 1000), MALFORMED | INVALID),
    "an object in an object, 100,000 times": (lambda: b'{"a":' * 100_000, MALFORMED),
    "a name twice": (lambda: email()[:-1] + b',"to":"eve@example.net"}', MALFORMED),
    "a name twice, once as an escape": (lambda: email()[:-1] + b',"t\\u006f":"eve@example.net"}', MALFORMED),
    "200,000 names, one of them twice": (
        lambda: data(b"{" + b",".join(b'"a%d":1' % number for number in range(199_000)) + b',"a0":1}'),
        MALFORMED,
    ),
    "strings that look like names": (lambda: text(rb"\"a\":" * (2 * MIB)), INVALID | {"202"}),
    "strings that look like names, in a large text": (lambda: text(rb"\"a\":" * (6 * MIB)), INVALID),
    "escapes": (lambda: text(rb"\u0041" * (MOST // 6)), INVALID | {"202"}),
    "escapes of lone surrogates": (lambda: text(rb"\ud800" * (MIB // 6)), MALFORMED | INVALID),
    "one non-ASCII character": (lambda: text(b"a" * (MOST - 200) + "\U0001f4e7".encode()), TOO_LARGE),
    "one non-ASCII character, as an escape": (lambda: text(b"a" * (MOST - 200) + rb"\ud83d\udce7"), TOO_LARGE),
    "bytes that are not UTF-8": (lambda: text(b"\xff" * MIB), MALFORMED),
    "an unterminated string": (lambda: b'"' + b"a" * MOST, MALFORMED),
    "quotes that are escaped": (lambda: b"[" * 400_001 + b'"' + rb"\"" * (MOST // 2 - 200_002), MALFORMED | TOO_LARGE),
    "spaces": (lambda: b" " * MOST, MALFORMED),
    "a byte order mark": (lambda: b"\xef\xbb\xbf" + email(), MALFORMED),
    "nothing": (lambda: b"", MALFORMED),
    "a text of 39 MB": (lambda: text(b"a" * MOST), INVALID),
    "a line without an end": (lambda: text(b"a" * (9 * MIB)), INVALID | {"202"}),
    "NULs": (lambda: text(rb"\u0000" * MIB), INVALID),
    "2,000 recipients": (lambda: email(to=["ann@example.org"] * 2000), INVALID),
    "1,000 recipients": (lambda: email(to=[f"a{n}@example.org" for n in range(1000)]), NOT_ALLOWED),
    "an address of 1 MB": (lambda: email(to="a" * MIB + "@example.org"), INVALID),
    "a domain of 1 MB": (lambda: email(to="a@" + "a." * MIB), INVALID),
    "an international domain that grows when encoded": (lambda: email(to="a@" + "\ufdfa" * 250 + ".org"), INVALID),
    "quotes in an address": (lambda: email(to='"' + '\\"' * 300 + '"@example.org'), INVALID),
    "comments in an address": (lambda: email(to="(" * 300 + "a@example.org"), INVALID),
    "100,000 headers": (lambda: email(headers={f"X-{n}": "" for n in range(100_000)}), INVALID),
    "a header of 1 MB": (lambda: email(headers={"X-A": "a" * MIB}), INVALID),
    "a recipient in a header": (lambda: email(headers={"Bcc": "eve@example.net"}), INVALID),
    "100,000 tags": (lambda: email(tags=[str(n) for n in range(100_000)]), INVALID),
    "a field's name of 1 MB": (lambda: email(**{"a" * MIB: 1}), INVALID),
    "100,000 attachments": (lambda: email(attachments=[FILE] * 100_000), INVALID | TOO_LARGE),
    "a program of 25 MB": (lambda: attached(24 * MIB, filename="a.exe"), NOT_ALLOWED),
    "base64 that fails at its end": (lambda: attached(24 * MIB)[:-5] + b'%"}]}', INVALID | MALFORMED),
    "attachments of 28 MB": (lambda: attached(28 * MIB), INVALID),
    "a filename of 1 MB": (lambda: email(attachments=[FILE | {"filename": "a" * MIB}]), INVALID),
}


async def _sent(make: Callable[[], bytes], target: Target) -> list[str]:
    named = (target.authorization(), f"Idempotency-Key: {target.message_key()}")
    return [await exchange(target.port, [post("/v1/emails", make(), *named)])]


async def _batched(make: Callable[[], bytes], target: Target) -> list[str]:
    return [await exchange(target.port, [post("/v1/emails/batch", make(), target.authorization())])]


async def _typed(headers: tuple[str, ...], body: bytes, target: Target) -> list[str]:
    named = (
        target.authorization(),
        f"Idempotency-Key: {target.message_key()}",
        f"Content-Length: {len(body)}",
        *headers,
    )
    return [await exchange(target.port, [head("POST /v1/emails", *named) + body])]


async def _in_chunks(piece: bytes, target: Target) -> list[str]:
    """Sends a body with chunked encoding, one small piece per chunk."""
    named = (target.authorization(), f"Idempotency-Key: {target.message_key()}", JSON, "Transfer-Encoding: chunked")
    chunks = piece * (MIB // len(piece))
    return [await exchange(target.port, [head("POST /v1/emails", *named) + chunks + b"0\r\n\r\n"])]


async def _in_chunks_without_key(piece: bytes, target: Target) -> list[str]:
    start = head("POST /v1/emails", JSON, "Transfer-Encoding: chunked")
    return [await exchange(target.port, [start + piece * (4 * MIB // len(piece))])]


async def _with_key_header(header: str, target: Target) -> list[str]:
    return [
        await exchange(target.port, [post("/v1/emails", email(), target.authorization(), f"Idempotency-Key: {header}")])
    ]


def batch(item: dict[str, Any], count: int = 1000) -> bytes:
    """A request body for a batch of `count` copies of one email."""
    return orjson.dumps({"emails": [item] * count})


BATCHES: Final[dict[str, tuple[Callable[[], bytes], frozenset[str]]]] = {
    "1,001 emails": (lambda: batch(EMAIL, 1001), frozenset({"422 invalid-body"})),
    "1,000 emails without a key": (lambda: batch(EMAIL), frozenset({"200"})),
    "1,000 emails with one key": (lambda: batch(EMAIL | {"message_key": "one"}), frozenset({"200"})),
    "1,000 emails of unknown fields": (
        lambda: batch(EMAIL | {"x" * 200 + str(n): 1 for n in range(30)}),
        frozenset({"200"}),
    ),
    "1,000 values that are not emails": (lambda: b'{"emails":[' + b"17," * 999 + b"17]}", frozenset({"200"})),
    "a million values that are not emails": (
        lambda: b'{"emails":[' + b"1," * MIB + b"1]}",
        TOO_LARGE,
    ),
}

CASES: Final = (
    *(
        Case("body", name, partial(_sent, cache(make)), frozenset(allowed) | BUSY)
        for name, (make, allowed) in TEXTS.items()
    ),
    *(Case("batch", name, partial(_batched, cache(make)), allowed | BUSY) for name, (make, allowed) in BATCHES.items()),
    *(
        Case("type", name, partial(_typed, headers, body), frozenset({"415 unsupported-media-type"}))
        for name, headers, body in (
            ("compressed", (JSON, "Content-Encoding: gzip"), b"\x1f\x8b" + bytes(100)),
            ("in another charset", ("Content-Type: application/json; charset=utf-16",), b"{}"),
            ("a form", ("Content-Type: multipart/form-data; boundary=x",), b"--x--"),
            ("none", (), b"{}"),
        )
    ),
    Case("pieces", "of one octet", partial(_in_chunks, b"1\r\n \r\n"), frozenset({"400 malformed-request"})),
    Case(
        "pieces",
        "of one octet with extensions",
        partial(_in_chunks, b"1;" + b"x" * 4000 + b"\r\n \r\n"),
        MALFORMED,
    ),
    Case(
        "pieces",
        "without a key",
        partial(_in_chunks_without_key, b"1\r\n \r\n"),
        frozenset({"400 malformed-request", "401 unauthorized"}),
    ),
    *(
        Case("identity", name, partial(_with_key_header, header), frozenset({"400 idempotency-key-invalid"}))
        for name, header in (
            ("of 20,000 characters", "k" * 20_000),
            ("beyond ASCII", "k\xe9"),
            ("with a tab", '"a\tb"'),
            ("with a quote that is open", '"' + "\\" * 2000),
        )
    ),
)
