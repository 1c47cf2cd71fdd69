"""Requests that two parsers may frame differently, trailers, and other protocols.

After each attack, a second request follows on the same connection. If the API answers the second request, or leaves the
connection open, a request was smuggled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from tests.abuse.case import Case, Target
from tests.abuse.raw_connection import HOST, JSON, get, head, provoke

REFUSED: Final = "400 malformed-request + end"
TOO_LARGE: Final = "431 headers-too-large + end"
BEHIND: Final = get("/healthz")
CHUNKED: Final = "Transfer-Encoding: chunked"
LAST: Final = b"0\r\n\r\n"


def _post(*headers: str) -> bytes:
    return head("POST /v1/emails", JSON, *headers)


def _bare(text: bytes) -> bytes:
    return text + b"\r\nHost: 127.0.0.1\r\n\r\n"


LENGTHS: Final = {
    "two lengths": _post("Content-Length: 5", "Content-Length: 6") + b"{}   ",
    "the same length twice": _post("Content-Length: 5", "Content-Length: 5") + b"{}   ",
    "a list of lengths": _post("Content-Length: 5, 5") + b"{}   ",
    "a length and chunks": _post("Content-Length: 5", CHUNKED) + LAST,
    "chunks and a length": _post(CHUNKED, "Content-Length: 5") + LAST,
    "a negative length": _post("Content-Length: -1"),
    "a length with a sign": _post("Content-Length: +5") + b"{}   ",
    "a hexadecimal length": _post("Content-Length: 0x5") + b"{}   ",
    "a length in two parts": _post("Content-Length: 5 5") + b"{}   ",
    "a length with an underscore": _post("Content-Length: 1_0") + b"{}        ",
    "an empty length": _post("Content-Length: ") + b"{}",
    "a length that overflows": _post(f"Content-Length: {2**64 + 5}") + b"{}   ",
    "a length of a thousand digits": _post("Content-Length: " + "9" * 1000) + b"{}   ",
    "a space before the colon": _post("Content-Length : 5") + b"{}   ",
    "a folded length": _post("Content-Length:\r\n 5") + b"{}   ",
    "a length after a bare line feed": _post("X-A: a\nContent-Length: 5") + b"{}   ",
    "a length after a bare carriage return": _post("X-A: a\rContent-Length: 5") + b"{}   ",
}
CODINGS: Final = {
    "an unknown coding": _post("Transfer-Encoding: xchunked") + LAST,
    "a coding before the chunks": _post("Transfer-Encoding: gzip, chunked") + LAST,
    "a coding after the chunks": _post("Transfer-Encoding: chunked, identity") + LAST,
    "chunks twice": _post("Transfer-Encoding: chunked, chunked") + LAST,
    "the coding in two headers": _post(CHUNKED, "Transfer-Encoding: identity") + LAST,
    "no coding": _post("Transfer-Encoding: ") + LAST,
    "a coding after a vertical tab": _post("Transfer-Encoding: \vchunked") + LAST,
    "a quoted coding": _post('Transfer-Encoding: "chunked"') + LAST,
    "a folded coding": _post("Transfer-Encoding:\r\n chunked") + LAST,
    "chunks in HTTP/1.0": b"POST /v1/emails HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST,
}
CHUNKS: Final = {
    "a negative chunk": _post(CHUNKED) + b"-1\r\n{}\r\n" + LAST,
    "a chunk of 2^80 octets": _post(CHUNKED) + b"f" * 20 + b"\r\n{}\r\n" + LAST,
    "a chunk size with a prefix": _post(CHUNKED) + b"0x2\r\n{}\r\n" + LAST,
    "a chunk size with a space before it": _post(CHUNKED) + b" 2\r\n{}\r\n" + LAST,
    "a chunk size that ends with a line feed": _post(CHUNKED) + b"2\n{}\r\n" + LAST,
    "a chunk longer than its size": _post(CHUNKED) + b"2\r\n{}{}\r\n" + LAST,
    "a chunk without an end": _post(CHUNKED) + b"2\r\n{}0\r\n\r\n",
    "a line feed in a chunk extension": _post(CHUNKED) + b"2;a=\nb\r\n{}\r\n" + LAST,
    "no chunk size": _post(CHUNKED) + b"\r\n{}\r\n" + LAST,
}
HEADS: Final = {
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": get("/healthz", HOST),
    "two hosts in HTTP/1.0": b"GET /healthz HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "HTTP/0.9 by name": _bare(b"GET /healthz HTTP/0.9"),
    "HTTP/2.0 by name": _bare(b"GET /healthz HTTP/2.0"),
    "HTTP/1.2": _bare(b"GET /healthz HTTP/1.2"),
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "a NUL in a header": get("/healthz", "X-A: a\0b"),
    "a NUL in the path": get("/healthz\0"),
    "an octet beyond ASCII in the path": get("/healthz\xff"),
    "a header without a colon": get("/healthz", "X-A"),
    "a header without a name": get("/healthz", ": a"),
    "a space before the first header": b"GET /healthz HTTP/1.1\r\n X-A: a\r\nHost: a\r\n\r\n",
    "an unknown method": head("STEAL /healthz"),
    "a method in lower case": head("get /healthz"),
    "no method": _bare(b" /healthz HTTP/1.1"),
    "a bare line feed after the request line": b"GET /healthz HTTP/1.1\nHost: a\r\n\r\n",
    "two spaces in the request line": _bare(b"GET  /healthz  HTTP/1.1 x"),
    "a target without a slash": head("GET healthz"),
}
TARGETS: Final = {
    "a URL": head("GET http://x"),
    "a URL without a host": head("GET http://"),
    "a URL with a port that does not exist": head("GET http://x:99999999/"),
}
UPGRADES: Final = {
    "to HTTP/2, with a body": _post("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA")
    + BEHIND,
    "to HTTP/2, with a length": _post("Connection: Upgrade", "Upgrade: h2c", f"Content-Length: {len(BEHIND)}"),
    "to HTTP/2, with chunks": _post("Connection: Upgrade", "Upgrade: h2c", CHUNKED) + LAST,
    "to a WebSocket": get("/healthz", "Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x"),
    "to TLS": get("/healthz", "Connection: Upgrade", "Upgrade: TLS/1.2"),
    "in capitals": get("/healthz", "CONNECTION: UPGRADE", "UPGRADE: H2C"),
    "to a tunnel": head("CONNECT example.com:443"),
}


async def _hostile(sent: bytes, target: Target) -> list[str]:
    return [await provoke(target.port, [sent + BEHIND])]


async def _trailed(headers: Sequence[str], target: Target) -> list[str]:
    trailers = [text.replace("KEY", target.keys["read"]) for text in headers]
    sent = head("GET /v1/emails?limit=1", CHUNKED) + b"2\r\n{}\r\n0\r\n" + "\r\n".join([*trailers, "", ""]).encode()
    return [await provoke(target.port, [sent + BEHIND])]


async def _endless(start: bytes, piece: bytes, target: Target) -> list[str]:
    """Sends endless bytes outside the body. The request has a valid key, so that the API does not refuse it before the
    body."""
    first = head("POST /v1/emails", JSON, *target.named(), CHUNKED)
    return [await provoke(target.port, [first + start, *[piece] * 4000])]


async def _endless_head(piece: bytes, target: Target) -> list[str]:
    return [await provoke(target.port, [b"GET /healthz HTTP/1.1\r\n", *[piece] * 4000])]


async def _harmless(sent: bytes, target: Target) -> list[str]:
    return [await provoke(target.port, [sent + get("/healthz", "Connection: close")])]


HARMLESS: Final = {
    # All parsers frame these requests in the same way, or the application refuses them. The second request gets a
    # separate response.
    "a target with another host": (head("GET http://evil.example/healthz"), "200 + 200 + end"),
    "a target that is a star": (head("OPTIONS *"), "404 not-found + 200 + end"),
    "a body of a GET": (head("GET /healthz", f"Content-Length: {len(BEHIND)}") + BEHIND, "200 + 200 + end"),
    "a trace": (head("TRACE /healthz"), "405 method-not-allowed + 200 + end"),
    "empty lines ahead": (b"\r\n\r\n" + BEHIND, "200 + 200 + end"),
    "dots in the path": (get("/v1/../healthz"), "404 not-found + 200 + end"),
    "a double slash": (get("//healthz"), "404 not-found + 200 + end"),
    "an encoded path": (get("/%2e%2e/%00/%ff/%zz"), "404 not-found + 200 + end"),
    "a Connection header that only looks like close": (get("/healthz", "Connection: close-not"), "200 + 200 + end"),
}

CASES: Final = (
    *(
        Case(family, name, partial(_hostile, sent), frozenset({REFUSED}))
        for family, cases in (
            ("length", LENGTHS),
            ("coding", CODINGS),
            ("chunk", CHUNKS),
            ("head", HEADS),
            ("target", TARGETS),
            ("upgrade", UPGRADES),
        )
        for name, sent in cases.items()
    ),
    *(Case("harmless", name, partial(_harmless, sent), frozenset({told})) for name, (sent, told) in HARMLESS.items()),
    *(
        Case("trailer", name, partial(_trailed, headers), frozenset({REFUSED, "401 unauthorized + " + REFUSED}))
        for name, headers in (
            ("a key", ["Authorization: Bearer KEY"]),
            ("a length", ["Content-Length: 60"]),
            ("a host", ["Host: b"]),
            ("a header without a colon", ["X-A"]),
        )
    ),
    *(
        Case("endless", name, partial(_endless, start, piece), frozenset({TOO_LARGE}))
        for name, start, piece in (
            ("trailer", b"0\r\nX-A: ", b"x" * 8000),
            ("chunk extension", b"1;", b"x" * 8000),
            ("chunk size", b"", b"0" * 8000),
        )
    ),
    *(
        Case("endless", name, partial(_endless_head, piece), frozenset({TOO_LARGE}))
        for name, piece in (("header", b"x" * 8000), ("number of headers", b"X: y\r\n" * 1000))
    ),
)
